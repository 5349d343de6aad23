"""What nvidia-smi prints, read: as it was captured, and anything else."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.tools.doctor.seeing import seen, warned, wrong
from worldsize.tools.doctor import nvidia

QUERY = """\
0, NVIDIA H200, 580.95.05, 1980, 1980, 34, 118.65, 700.00, 0x0000000000000000, 0, No, 5, 16, 16, 143771, 0, 0
1, NVIDIA H200, 580.95.05, 345, 1980, 91, 699.10, 700.00, 0x0000000000000048, 3, Yes, 5, 8, 16, 143771, 90000, 100
2, NVIDIA GeForce RTX 2080, 535.1, 300, 2100, 40, [N/A], [N/A], Not Active, [N/A], [N/A], 3, 16, 16, 8192, 10, 0
"""
NVLINK = """\
GPU 0: NVIDIA H200 (UUID: GPU-0)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
\t Link 2: <inactive>
GPU 1: NVIDIA H200 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
"""
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\t0-15\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t0-15\t0\t\tN/A
NIC0\tSYS\tSYS\t X \t\t\t\t

Legend:
  X    = Self
"""


def test_gpus_as_captured() -> None:
    """Values, and None for what a card does not say."""
    first, second, third = nvidia.gpus(QUERY)
    assert (first.name, first.clock, first.uncorrected, first.slowed) == ("NVIDIA H200", 1980, 0, [])
    assert second.slowed == ["hardware slowdown", "hardware thermal slowdown"]
    assert (second.pending, second.width, second.memory_used) == (True, 8, 90000)
    assert (third.power, third.uncorrected, third.reasons) == (None, None, 0)


def test_links_as_captured() -> None:
    """GB/s a GPU, active links alone."""
    assert nvidia.links(NVLINK) == {0: 53.124, 1: 26.562}


def test_topology_as_captured() -> None:
    """Between GPUs; cards of the network and escapes for underlining are passed over."""
    assert nvidia.topology(TOPOLOGY) == {(0, 1): "NV18", (1, 0): "NV18"}


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    """Whatever a driver prints, nothing is raised."""
    nvidia.gpus(text)
    nvidia.links(text)
    nvidia.topology(text)


CELL = st.one_of(
    st.floats(0, 1e6).map("{:.2f}".format),
    st.sampled_from(["[N/A]", "[Unknown Error]", "", "0xff", "ERR!", "²", "٣"]),
)


@given(st.lists(st.lists(CELL, min_size=16, max_size=16), max_size=4))
def test_any_values_are_read(rows: list[list[str]]) -> None:
    """One GPU a line, its number kept."""
    text = "\n".join(", ".join([str(number), *row]) for number, row in enumerate(rows))
    assert [gpu.index for gpu in nvidia.gpus(text)] == list(range(len(rows)))


@given(st.dictionaries(st.integers(0, 15), st.lists(st.integers(1, 100), min_size=1, max_size=18), min_size=1))
def test_links_are_added_up(speeds: dict[int, list[int]]) -> None:
    """Of each GPU alone."""
    lines = [
        "\n".join([f"GPU {gpu}: X (UUID: Y)", *(f"\t Link {at}: {speed} GB/s" for at, speed in enumerate(each))])
        for gpu, each in speeds.items()
    ]
    assert nvidia.links("\n".join(lines)) == {gpu: sum(each) for gpu, each in speeds.items()}


def test_a_sick_gpu_is_its_hosts_fault() -> None:
    """Uncorrectable errors and a slowdown by hardware; the host that has fewer GPUs too."""
    one = seen()
    healthy = QUERY.splitlines()[0]
    for name in one.facts:
        one.facts[name] = replace(one.facts[name], smi={"query": f"{healthy}\n{healthy}"})
    assert wrong(one) == {}
    one.facts["b"] = replace(one.facts["b"], smi={"query": "\n".join(QUERY.splitlines()[:2])})
    one.facts["c"] = replace(one.facts["c"], smi={"query": healthy})
    assert set(wrong(one)) == {"b", "c"}
    assert {finding.where for finding in warned(one)} == {("b",)}


def test_a_gpu_with_fewer_links_is_a_warning() -> None:
    """With its number."""
    one = seen()
    rows = "\n".join(QUERY.splitlines()[0].replace("0,", f"{gpu},", 1) for gpu in range(2))
    for name in one.facts:
        one.facts[name] = replace(one.facts[name], smi={"query": rows, "nvlink": NVLINK, "topo": TOPOLOGY})
    assert {finding.what.partition(":")[0] for finding in warned(one)} == {"GPU 1"}


def test_nvidia_smi_that_fails_is_its_hosts_fault() -> None:
    """With what it said."""
    one = seen()
    one.facts["d"] = replace(one.facts["d"], smi={"error": "Unable to determine the device handle"})
    assert "nvidia-smi fails" in wrong(one)["d"]
