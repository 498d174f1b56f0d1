"""The entry point for recorded sessions: files and folders in, sessions and problems out.

Nothing here uses torch, a tokenizer or the store, and no more than one session is held at a time
(for formats with one session per file: one file). The format of each file is detected from its
lines, not from its name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from opd.replay.recordings.formats.claude_code.sessions import is_claude_code, read_claude_code
from opd.replay.recordings.formats.export.sessions import is_export, read_export
from opd.replay.recordings.formats.lines import MAX_LINE_BYTES, Line, read_lines
from opd.replay.recordings.formats.openai_chat import is_openai_chat, read_openai_chat
from opd.replay.recordings.formats.openclaw import is_openclaw, read_openclaw
from opd.replay.recordings.formats.openclaw_rl import is_openclaw_rl, read_openclaw_rl
from opd.replay.recordings.formats.opened import UNREADABLE, is_array, opened
from opd.replay.recordings.recorded import ImportProblem, Problem, Recording, RecordingFormat
from opd.replay.recordings.votes import is_votes

_Matcher = Callable[[dict[str, Any]], bool]
_Reader = Callable[[Path, int], Recording]

# In this order, because lines of OpenClaw-RL contain a list of messages too.
_FORMATS: dict[RecordingFormat, tuple[_Matcher, _Reader]] = {
    RecordingFormat.EXPORT: (is_export, read_export),
    RecordingFormat.OPENCLAW_RL: (is_openclaw_rl, read_openclaw_rl),
    RecordingFormat.CLAUDE_CODE: (is_claude_code, read_claude_code),
    RecordingFormat.OPENCLAW: (is_openclaw, read_openclaw),
    RecordingFormat.OPENAI_CHAT: (is_openai_chat, read_openai_chat),
}
_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_ENDS = (*_LINES, ".json", ".json.gz", ".json.zst")
_LINES_LOOKED_AT = 1000
_BYTES_LOOKED_AT = 4096
_FIELDS_TOLD = 8
_OTHER_FILES = {
    b"\xfd7zXZ": "compressed (xz); unpack it first",
    b"BZh": "compressed (bzip2); unpack it first",
    b"PK\x03\x04": "an archive (zip); unpack it first",
    b"PAR1": "Parquet; write its rows as JSON lines",
    b"\xff\xfe": "UTF-16; save it as UTF-8",
    b"\xfe\xff": "UTF-16; save it as UTF-8",
}


def read_recordings(paths: Sequence[Path], max_line_bytes: int = MAX_LINE_BYTES) -> Recording:
    """The sessions of files and folders in order, and everything that is wrong in them.

    A folder stands for all `*.jsonl` files below it (compressed ones too, and arrays among
    `*.json`), sorted by path; a file that several paths lead to is read once. A file that cannot be
    read or has an unknown format gives one Problem, and the rest is read. Lines over
    `max_line_bytes` are skipped without being held.
    """
    for path in _files(paths):
        if isinstance(path, Problem):
            yield path
            continue
        found = detect_format(path, max_line_bytes)
        if isinstance(found, Problem):
            yield found
        else:
            _, read = _FORMATS[found]
            yield from read(path, max_line_bytes)


def check_recordings(paths: Sequence[Path]) -> None:
    """Raise ValueError, with the reason, if none of the files can be read as recordings."""
    problems = []
    for path in _files(paths):
        found = path if isinstance(path, Problem) else detect_format(path)
        if not isinstance(found, Problem):
            return
        problems.append(found)
    more = f" (and {len(problems) - 1} more files like that)" if len(problems) > 1 else ""
    raise ValueError(f"{problems[0].source}: {problems[0].detail}{more}")


def detect_format(path: Path, max_line_bytes: int = MAX_LINE_BYTES) -> RecordingFormat | Problem:
    """The format of the first line of `path` that has a known one; earlier lines may have none."""
    fields: list[str] | None = None
    for line in itertools.islice(read_lines(path, max_line_bytes), _LINES_LOOKED_AT):
        if isinstance(line, Line):
            fields = list(line.value) if fields is None else fields
            if is_votes(line.value):
                return _unknown(path, "it contains votes of a judge and no sessions: use --votes")
            for name, (matches, _) in _FORMATS.items():
                if matches(line.value):
                    return name
        elif line.reason is ImportProblem.UNREADABLE:
            return line
    if fields is None:
        return _unknown(path, f"it has no line that is a JSON object{_what_else(path)}")
    names = ", ".join(name.value for name in _FORMATS)
    told = ", ".join(map(repr, fields[:_FIELDS_TOLD])) or "none"
    detail = f"its lines are in none of the formats {names}; fields of the first: {told}"
    return _unknown(path, detail)


def _what_else(path: Path) -> str:
    """What a file without JSON lines looks like, and what to do, as the end of a sentence."""
    with opened(path) as file:
        begin = file.read(_BYTES_LOOKED_AT)
    for magic, what in _OTHER_FILES.items():
        if begin.startswith(magic):
            return f": it is {what}"
    begin = begin.lstrip()
    if not begin:
        return ": it is empty"
    if begin.startswith(b"{"):
        return ": its JSON takes several lines; write each object as one (jq -c . FILE)"
    return ""


def _unknown(path: Path, detail: str) -> Problem:
    return Problem(source=str(path), reason=ImportProblem.UNKNOWN_FORMAT, detail=detail)


def _files(paths: Sequence[Path]) -> Iterator[Path | Problem]:
    """The files to read, each once."""
    taken: set[Path] = set()
    for path in paths:
        is_folder = path.is_dir()
        files = _below(path) if is_folder else [path]
        if not files:
            detail = f"no {' or '.join(f'*{end}' for end in _ENDS)} below it"
            yield Problem(source=str(path), reason=ImportProblem.UNREADABLE, detail=detail)
        for file in files:
            resolved = file.resolve()
            if resolved not in taken:
                taken.add(resolved)
                yield file


def _below(folder: Path) -> list[Path]:
    """The recordings below a folder; a `.json` is one if it is an array."""
    found = []
    for file in sorted(folder.rglob("*.json*")):
        if not file.name.endswith(_ENDS) or not file.is_file():
            continue
        if file.name.endswith(_LINES) or _is_array(file):
            found.append(file)
    return found


def _is_array(file: Path) -> bool:
    try:
        return is_array(file)
    except UNREADABLE:
        return True  # it is reported when it is read
