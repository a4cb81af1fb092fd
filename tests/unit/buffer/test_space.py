"""A buffer server that asks for more memory or disk than there is says so before it starts."""

import re

import pytest

from rlightning.buffer.durable import space
from rlightning.buffer.durable.space import check_space
from rlightning.errors import ConfigError
from rlightning.utils.config import BufferConfig
from rlightning.utils.memory import MemoryLimit, container_limit, in_memory

MIB = 2**20
V1, V2 = "memory.limit_in_bytes", "memory.max"


def tree(root, files):
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "nbytes", "said_in"),
    [
        ({}, None, None),
        # Version 2: in the namespace of a container, and as the machine sees it.
        ({"proc/self/cgroup": "0::/\n", f"sys/fs/cgroup/{V2}": "1000\n"}, 1000, V2),
        ({"proc/self/cgroup": "0::/\n", f"sys/fs/cgroup/{V2}": "max\n"}, None, None),
        (
            {
                "proc/self/cgroup": "0::/a.slice/b.scope\n",
                f"sys/fs/cgroup/a.slice/{V2}": "900\n",
                f"sys/fs/cgroup/a.slice/b.scope/{V2}": "max\n",
            },
            900,
            f"a.slice/{V2}",
        ),
        # Version 1: a container may see its own group as the root, under the path of the machine.
        (
            {
                "proc/self/cgroup": "4:cpu,memory:/docker/x\n1:cpu:/\n0::/docker/x\n",
                f"sys/fs/cgroup/memory/{V1}": "800\n",
            },
            800,
            f"memory/{V1}",
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/docker/x\n",
                f"sys/fs/cgroup/memory/{V1}": "9223372036854771712\n",
                f"sys/fs/cgroup/memory/docker/x/{V1}": "700\n",
            },
            700,
            f"memory/docker/x/{V1}",
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                f"sys/fs/cgroup/memory/{V1}": "9223372036854771712\n",
            },
            None,
            None,
        ),
    ],
)
def test_the_limit_of_a_container_is_found(tmp_path, files, nbytes, said_in):
    limit = container_limit(tree(tmp_path, files))
    if nbytes is None:
        assert limit is None
    else:
        assert limit == MemoryLimit(nbytes, tmp_path / "sys/fs/cgroup" / said_in)


def test_folders_in_memory_are_known(tmp_path):
    mounts = (
        "/dev/vda / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n"
        f"/dev/vdb {tmp_path}/disk xfs rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\n"
        f"tmpfs {tmp_path}/a\\040b tmpfs rw 0 0\n/dev/vdc {tmp_path}/a\\040b ext4 rw 0 0\n"
    )
    root = tree(tmp_path / "root", {"proc/self/mounts": mounts})
    assert in_memory(tmp_path / "not" / "there", root)
    assert not in_memory(tmp_path / "disk" / "x", root)
    assert not in_memory(tmp_path / "a b", root)
    assert not in_memory(tmp_path, tmp_path / "nowhere")


def config(**values):
    return BufferConfig(type="ReplayBuffer", capacity=1000, **values)


def limited(tmp_path, nbytes):
    return MemoryLimit(nbytes, tmp_path / "memory.max")


def test_more_memory_than_the_container_has_is_refused_with_the_arithmetic(tmp_path):
    check_space(config(max_bytes=100 * MIB), limited(tmp_path, 150 * MIB))
    check_space(config(), limited(tmp_path, MIB))  # takes a part of what there is
    with pytest.raises(ConfigError) as caught:
        check_space(config(max_bytes=100 * MIB), limited(tmp_path, 150 * MIB - 1))
    assert str(caught.value) == (
        "buffer.max_bytes: 104,857,600 for transitions (buffer.max_bytes) + 52,428,800 for messages "
        "and batches (half of it) = 157,286,400 bytes are more than the 157,286,399 that this "
        f"container may take ({tmp_path}/memory.max): lower it, or raise the limit"
    )


def test_less_disk_than_the_buffer_may_take_is_refused_with_the_arithmetic(tmp_path):
    asked = config(max_bytes=MIB, data_dir=str(tmp_path / "data"), durability="process")
    check_space(asked, free_bytes=6 * MIB)
    with pytest.raises(ConfigError) as caught:
        check_space(asked, free_bytes=6 * MIB - 1)
    assert (
        "may take 6,291,456 bytes (2 x (buffer.checkpoint_keep 2 + 1) x buffer.max_bytes 1,048,576), "
        "of which 0 are there and 6,291,455 are free: make room"
    ) in str(caught.value)
    # What a server before it left there counts, or none could start again on a full disk.
    tree(tmp_path / "data", {"journal/1": "x" * 1000})
    check_space(asked, free_bytes=6 * MIB - 1000)
    # Without a journal, and without max_bytes the least that it can be.
    check_space(config(max_bytes=MIB, data_dir=str(tmp_path / "data")), free_bytes=3 * MIB)
    least = config(data_dir=str(tmp_path / "new"), durability="process", checkpoint_keep=1)
    check_space(least, free_bytes=4 * 32 * 1000)
    with pytest.raises(
        ConfigError, match=re.escape("x 1,000 transitions (buffer.capacity) of at ")
    ):
        check_space(least, free_bytes=4 * 32 * 1000 - 1)


def test_a_data_directory_in_memory_counts_as_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(space, "in_memory", lambda folder: True)
    asked = config(max_bytes=MIB, data_dir=str(tmp_path / "data"), durability="process")
    needed = MIB + MIB // 2 + 6 * MIB
    check_space(asked, limited(tmp_path, needed))
    with pytest.raises(ConfigError, match=f"6,291,456 for {tmp_path}/data, which is in memory"):
        check_space(asked, limited(tmp_path, needed - 1))
