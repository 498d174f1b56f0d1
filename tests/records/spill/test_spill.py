"""Spill files: what is synced is there, what is torn is known, and an owner's death is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from records.errors import StoreUnavailable
from records.names import DropReason, TurnState
from records.spill.spill import SpillFile, orphans, waiting_files, withdraw
from records.spill.spilled import Addition, decode, encode
from records.store import Store
from tests.records.builders import REPLY, SCOPE, a_session, a_turn, following, recorded, state_of


def payloads(file: SpillFile) -> list[bytes]:
    return [record.payload for record in file.read()]


def left_behind(file: SpillFile) -> SpillFile:
    """The file after its process died."""
    file.close()
    orphan = SpillFile.orphan(file.path)
    assert orphan is not None
    return orphan


@pytest.mark.parametrize("reserve", [0, 4096])
def test_what_was_appended_is_read_by_the_next_process(tmp_path: Path, reserve: int) -> None:
    file = SpillFile.create(tmp_path / "spill", reserve)
    file.append(1.0, b"first")
    file.append(2.0, b"second" * 1000)
    orphan = left_behind(file)
    assert [(record.at, record.payload) for record in orphan.read()] == [
        (1.0, b"first"),
        (2.0, b"second" * 1000),
    ]
    assert (orphan.is_torn, orphan.num_damaged) == (False, 0)
    assert orphan.path.stat().st_mode & 0o777 == 0o600
    orphan.remove()
    assert list((tmp_path / "spill").iterdir()) == []


def test_every_tear_of_the_last_record_is_recognised(tmp_path: Path) -> None:
    file = SpillFile.create(tmp_path, 0)
    file.append(1.0, b"first")
    whole = file.end
    file.append(2.0, b"second")
    data = file.path.read_bytes()
    file.close()
    for length in range(whole + 1, len(data)):
        for rest in (b"", bytes(len(data) - length)):
            file.path.write_bytes(data[:length] + rest)
            orphan = SpillFile.orphan(file.path)
            assert orphan is not None
            assert payloads(orphan) == [b"first"]
            assert (orphan.is_torn, orphan.num_damaged) == (True, 0)
            orphan.close()


def test_damage_in_the_middle_costs_one_record_and_the_file_is_kept(tmp_path: Path) -> None:
    file = SpillFile.create(tmp_path, 0)
    for payload in (b"first", b"second", b"third"):
        file.append(1.0, payload)
    data = file.path.read_bytes()
    file.path.write_bytes(data.replace(b"second", b"sEcond"))
    for _ in range(2):
        assert payloads(file) == [b"first", b"third"]
        assert (file.is_torn, file.num_damaged) == (False, 1)
    file.remove()
    assert [path.suffix for path in tmp_path.iterdir()] == [".damaged"]


def test_a_damaged_head_is_no_tear_and_the_file_is_kept(tmp_path: Path) -> None:
    file = SpillFile.create(tmp_path, 0)
    for payload in (b"first", b"second", b"third"):
        file.append(1.0, payload)
    whole = file.path.read_bytes()
    second = whole.index(b"OPDS", 4)
    file.path.write_bytes(whole[:second] + b"opds" + whole[second + 4 :])
    assert payloads(file) == [b"first"]
    assert file.num_damaged == 1
    file.remove()
    assert [path.suffix for path in tmp_path.iterdir()] == [".damaged"]


def test_a_record_inside_a_record_is_content(tmp_path: Path) -> None:
    forger = SpillFile.create(tmp_path, 0)
    forger.append(1.0, b"forged")
    forged = forger.path.read_bytes()
    forger.remove()
    file = SpillFile.create(tmp_path, 0)
    file.append(1.0, b"said: " + forged)
    os.truncate(file.path, file.end - 1)
    assert payloads(file) == []
    assert file.is_torn


def test_the_file_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    file = SpillFile.create(tmp_path, 0)
    assert orphans(tmp_path) == []
    assert waiting_files(tmp_path) == []
    file.append(1.0, b"x")
    assert waiting_files(tmp_path) == [file.path]
    file.close()
    (orphan,) = orphans(tmp_path)
    assert orphans(tmp_path) == []  # taken by one
    orphan.remove()


def test_clearing_keeps_the_room_and_nothing_else(tmp_path: Path) -> None:
    file = SpillFile.create(tmp_path, 4096)
    file.append(1.0, b"secret" * 2000)
    file.clear()
    assert file.path.read_bytes() == bytes(4096)
    file.append(2.0, b"next")
    assert payloads(file) == [b"next"]
    file.clear()
    assert file.path.read_bytes() == bytes(4096)
    file.remove()


FULL = """
import resource, signal, sys
from pathlib import Path
from records.spill.spill import SpillFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = SpillFile.create(Path(sys.argv[1]), 1000)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
file.append(1.0, b"a" * 400)
try:
    file.append(2.0, b"b" * 4000)
except OSError as error:
    print(error.errno)
file.append(3.0, b"c" * 400)
"""


def test_a_record_that_does_not_fit_leaves_the_others_whole(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "27"  # EFBIG
    (orphan,) = orphans(tmp_path)
    assert payloads(orphan) == [b"a" * 400, b"c" * 400]
    assert not orphan.is_torn
    orphan.remove()


def test_no_room_at_the_start_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailable, match=r"no room.*store\.spill_folder"):
        SpillFile.create(tmp_path / "file", 0)


def test_an_addition_survives_its_bytes() -> None:
    experts = np.arange(12, dtype=np.int16).reshape(6, 1, 2)
    turn = a_turn(
        "session",
        drop_reason=DropReason.ABORTED,
        routed_experts=experts,
        messages=[{"role": "user", "content": "nul \x00, lone \ud800, é"}],
    )
    addition = Addition(
        scope=SCOPE, created_at=1.5, turn=turn, answers="x", next_state=(REPLY,), is_deferred=True
    )
    back = decode(encode(addition))
    assert back.turn is not None
    assert (back.answers, back.next_state, back.created_at) == ("x", (REPLY,), 1.5)
    for name in ("prompt_ids", "response_ids", "rollout_logprobs", "routed_experts"):
        left, right = getattr(back.turn, name), getattr(turn, name)
        np.testing.assert_array_equal(left, right)
        assert left.dtype == right.dtype
    for name in ("messages", "turn_type", "drop_reason", "version_spans", "sampling", "response"):
        assert getattr(back.turn, name) == getattr(turn, name)
    with pytest.raises(ValueError, match="unknown format"):
        decode(b'{"format": 99}')


async def test_an_addition_is_taken_in_once(store: Store) -> None:
    earlier = a_turn(await a_session(store))
    await store.record_turn(earlier, scope=SCOPE)
    turn = following(earlier, session_id="new session")
    addition = decode(
        encode(
            Addition(
                scope=SCOPE,
                created_at=77.0,
                turn=turn,
                answers=earlier.turn_id,
                next_state=(REPLY,),
            )
        )
    )
    assert await store.take_in(addition)
    assert not await store.take_in(addition)
    stored = await store.turn(turn.turn_id)
    assert stored is not None
    assert (stored.session_id, stored.created_at) == ("new session", 77.0)
    assert stored.prompt_ids.tolist() == turn.prompt_ids.tolist()
    assert stored.parent_turn_id == earlier.turn_id
    assert await state_of(store, earlier.turn_id) is TurnState.JUDGING


async def test_an_addition_whose_parent_is_gone_loses_only_the_link(store: Store) -> None:
    turn = a_turn("session", parent_turn_id="gone")
    assert await store.take_in(Addition(scope=SCOPE, created_at=1.0, turn=turn))
    stored = await store.turn(turn.turn_id)
    assert stored is not None
    assert stored.parent_turn_id is None


async def test_a_next_state_alone_is_taken_in(store: Store) -> None:
    turn_id = await recorded(store)
    addition = Addition(scope=SCOPE, created_at=1.0, answers=turn_id, next_state=(REPLY,))
    assert not await store.take_in(addition)
    assert await state_of(store, turn_id) is TurnState.JUDGING


KILLED = """
import sys
from pathlib import Path
from records.spill.spill import SpillFile
file = SpillFile.create(Path(sys.argv[1]), 4096)
file.append(1.0, b"acknowledged")
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_killed_process_leaves_its_records_to_the_next(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert orphans(tmp_path) == []
        process.kill()
    (orphan,) = orphans(tmp_path)
    assert payloads(orphan) == [b"acknowledged"]
    assert not orphan.is_torn
    orphan.remove()


def test_withdrawn_records_are_gone_and_the_others_stay(tmp_path: Path) -> None:
    file = SpillFile.create(tmp_path, 0)
    for payload in (b"ann 1", b"bob", b"ann 2"):
        file.append(1.0, payload)
    assert withdraw(tmp_path, lambda payload: payload.startswith(b"ann")) == (0, [file.path])
    file.close()
    assert withdraw(tmp_path, lambda payload: payload.startswith(b"ann")) == (2, [])
    (orphan,) = orphans(tmp_path)
    assert payloads(orphan) == [b"bob"]
    assert b"ann" not in orphan.path.read_bytes()
    orphan.remove()
