from rollout_bridge.engine.served import AdapterRef, ServedFile, ServedVersion
from rollout_bridge.stop_order import (
    ROLLBACK_FILE,
    StopOrder,
    goes_back,
    order_stop,
    read_stop,
)


def test_an_order_says_why_and_what_serves(tmp_path):
    assert read_stop(tmp_path) is None
    order = StopOrder(reason="obedience fell", serve_version=3)
    order_stop(tmp_path, order)
    order_stop(tmp_path, StopOrder(reason="another"))
    assert read_stop(tmp_path) == order, "the first reason stays"
    assert [path.name for path in tmp_path.iterdir()] == ["stop"]


def test_a_file_that_somebody_touched_is_an_order(tmp_path):
    (tmp_path / "stop").touch()
    assert read_stop(tmp_path) == StopOrder()
    (tmp_path / "stop").write_text("enough for today\n")
    assert read_stop(tmp_path) == StopOrder(reason="enough for today")
    (tmp_path / "stop").write_text("[1]")
    assert read_stop(tmp_path) == StopOrder(reason="[1]")


def test_a_run_goes_back_until_the_ordered_version_serves(tmp_path):
    served = ServedFile(tmp_path)
    assert not goes_back(tmp_path)
    order_stop(tmp_path, StopOrder(reason="the guard", serve_version=1))
    assert goes_back(tmp_path), "engines with full weights: until the order names no version"
    served.write(ServedVersion(label="2", adapter=AdapterRef(name="b", path="b")))
    assert goes_back(tmp_path)
    served.write(ServedVersion(label="1", adapter=AdapterRef(name="a", path="a")))
    assert not goes_back(tmp_path)
    (tmp_path / ROLLBACK_FILE).touch()
    assert goes_back(tmp_path)
