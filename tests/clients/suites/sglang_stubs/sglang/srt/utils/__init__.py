"""No process was started, so none is ended."""

import os


def kill_process_tree(pid: int | None) -> None:
    assert pid is None


def get_bool_env_var(name: str, default: str = "false") -> bool:
    return os.environ.get(name, default).lower() in ("1", "true")
