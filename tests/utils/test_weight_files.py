"""Reading ahead gives each tensor its own bytes, whatever the pieces; and ends well."""

import gc
import os
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.utils import weight_files
from nanovllm.utils.weight_files import ModelLoadError, read_ahead, read_headers, read_tensors

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    """Two files of tensors of all sizes and types, some of them empty or of no dimension."""
    shapes = [(), (0,), (1,), (7,), (3, 5), (64, 64), (257, 3), (2, 3, 4), (1000,)]
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    for file in "ab":
        tensors = {
            f"{file}{i}.{j}": torch.randn(shape).to(dtype)
            for i, shape in enumerate(shapes)
            for j, dtype in enumerate(dtypes)
        }
        save_file(tensors, tmp_path / f"{file}.safetensors")
    return tmp_path


def in_order(stored):
    names = sorted(stored, key=lambda name: (stored[name].file, stored[name].start))
    return {name: stored[name] for name in names}


def assert_equal_to_files(found, folder):
    expected = load_file(folder / "a.safetensors") | load_file(folder / "b.safetensors")
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert values.dtype == expected[name].dtype and values.shape == expected[name].shape
        assert torch.equal(values, expected[name]), name


@pytest.mark.parametrize("piece", [8, 24, 1000, 4096, 1 << 20])
@pytest.mark.parametrize("max_ahead", [0, 5000, 1 << 30])
def test_reading_ahead_gives_the_files_tensors(piece, max_ahead, folder, monkeypatch):
    monkeypatch.setattr(weight_files, "PIECE", piece)
    monkeypatch.setattr(weight_files, "MAX_AHEAD", max_ahead)
    stored = in_order(read_headers(folder))
    found = dict(read_ahead(stored, CPU))
    assert list(found) == list(stored)
    assert_equal_to_files(found, folder)


def test_the_cpu_reads_the_same_in_the_order_of_the_files(folder):
    stored = read_headers(folder)
    found = {name: values.clone() for name, values in read_tensors(stored, CPU)}
    assert list(found) == list(in_order(stored))
    assert_equal_to_files(found, folder)


class LateStages(weight_files._Stages):
    """Copies happen when they are waited for, as on a device that is far behind."""

    def __init__(self, device):
        super().__init__(device)
        self.events = []

    class Event:
        def __init__(self):
            self.copies = []

        def synchronize(self):
            for piece, half in self.copies:
                piece.copy_(half)
            self.copies.clear()

    def _make_half(self):
        event = self.Event()  # of this half alone: other threads append too
        self.events.append(event)
        return super()._make_half()[0], event

    def _copy(self, piece, half, copied):
        copied.copies.append((piece, half))


def test_memory_is_not_read_into_while_a_copy_of_it_is_due(folder, monkeypatch):
    """R39: a buffer that is filled again while a copy still reads it."""
    made = []
    monkeypatch.setattr(weight_files, "PIECE", 64)
    monkeypatch.setattr(
        weight_files, "_Stages", lambda device: made.append(LateStages(device)) or made[-1]
    )
    found = dict(read_ahead(in_order(read_headers(folder)), CPU))
    for event in made[0].events:
        event.synchronize()
    assert_equal_to_files(found, folder)


def test_no_more_is_read_ahead_than_allowed(folder, monkeypatch):
    monkeypatch.setattr(weight_files, "MAX_AHEAD", 20_000)
    stored = in_order(read_headers(folder))
    asked, largest = 0, 0
    read = weight_files._Stages.read

    def count(self, tensor, fd):
        nonlocal asked
        asked += tensor.num_bytes
        return read(self, tensor, fd)

    monkeypatch.setattr(weight_files._Stages, "read", count)
    taken = 0
    for name, _ in read_ahead(stored, CPU):
        largest = max(largest, asked - taken)
        taken += stored[name].num_bytes
    # 64 x 64 float64 values alone are more than that.
    assert taken == asked and largest <= 32_768 + 20_000


def num_open():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_stopping_early_leaves_no_thread_and_no_file_open(folder):
    before = num_open(), threading.active_count()
    reader = read_ahead(in_order(read_headers(folder)), CPU)
    next(reader)
    assert num_open() > before[0]
    reader.close()
    assert (num_open(), threading.active_count()) == before


@pytest.mark.parametrize("change", ["truncated", "gone"])
def test_file_that_changes_after_its_header_was_read_is_named(change, folder):
    before = num_open(), threading.active_count()
    stored = in_order(read_headers(folder))
    file = folder / "b.safetensors"
    if change == "gone":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size - 10)
    with pytest.raises(ModelLoadError, match="b.safetensors: got a file that cannot be read"):
        list(read_ahead(stored, CPU))
    assert (num_open(), threading.active_count()) == before


def test_header_that_two_readers_take_for_different_things_is_refused(folder, monkeypatch):
    """We read offsets ourselves, and trust them as far as the library's reading agrees."""
    loads = weight_files.json.loads

    def other(text):
        header = loads(text)
        header["a1.0"]["shape"] = [3]
        return header

    monkeypatch.setattr(weight_files.json, "loads", other)
    with pytest.raises(ModelLoadError, match="a.safetensors.*a1.0 is described twice"):
        read_headers(folder)
