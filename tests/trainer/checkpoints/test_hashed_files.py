import hashlib

import pytest
import torch

from trainer.checkpoints.hashed_files import HashedFiles


def test_sizes_and_hashes_are_those_of_what_lies_on_disk(tmp_path):
    (tmp_path / "weights").write_bytes(b"x" * 100_000)
    state = {"exp_avg": torch.arange(50_000.0), "step": 3}
    with HashedFiles(tmp_path) as hashed:
        hashed.take([tmp_path / "weights"])
        hashed.save(state, "optimizer.pt")
        found = hashed.entries()
    assert list(found) == ["optimizer.pt", "weights"]
    for name, entry in found.items():
        content = (tmp_path / name).read_bytes()
        assert (entry.size, entry.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert torch.equal(loaded["exp_avg"], state["exp_avg"])


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    with HashedFiles(tmp_path) as hashed:
        hashed.take([tmp_path / "none"])
        with pytest.raises(FileNotFoundError):
            hashed.entries()
