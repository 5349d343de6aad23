"""Room: DeepSpeed's ZeRO and Horovod by formula, from what the same program holds under ddp. Upper bounds. No torch.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5; the buffers are
those of DeepSpeed 0.19's defaults. Parameters are held as the run's precision says: in float32 under autocast.
"""

from __future__ import annotations

from typing import Any

_BUCKET = 500_000_000
"""Numbers in a reduce bucket, of which there are two while they overlap."""
_LIVE = 1_000_000_000
"""Numbers that stage 3 keeps whole at most."""
_PREFETCH = 50_000_000
_FUSION = 2 * 128 * 2**20
"""Bytes of Horovod's fusion buffers."""


def applied(strategy: str, answer: dict[str, Any], ranks: int) -> dict[str, Any]:
    """What was answered for ddp, as another engine would hold it.

    Args:
        strategy: of `layouts.BY_FORMULA`.
        answer: for ddp over as many ranks.
        ranks: over which state is cut.
    """
    if "error" in answer:
        return answer
    stage = int(strategy[-1]) if strategy.startswith("zero") else 1
    change = _horovod if strategy == "horovod" else _zero
    peaks = {name: change(dict(peak["parts"]), answer, stage, ranks) for name, peak in answer["phases"].items()}
    parts = max(peaks.values(), key=lambda each: sum(each.values()))
    traffic = answer["traffic"] if strategy == "horovod" else _traffic(answer, stage, ranks)
    built = answer["built"] | {"parts": {}, "size": answer["built"]["size"] if stage < 3 else 0}  # noqa: PLR2004
    note = f"{strategy} by formula from ddp: an upper bound"
    return {
        **answer, "peak": sum(parts.values()), "parts": parts, "phases": {}, "built": built, "traffic": traffic,
        "notes": [*answer["notes"], note], "formula": True,
    }  # fmt: skip


def _horovod(parts: dict[str, int], answer: dict[str, Any], stage: int, ranks: int) -> dict[str, int]:
    """Gradients lie by themselves, and are copied into buffers to be summed."""
    del stage, ranks
    gradients = _trained(answer)
    return {**parts, "gradients": gradients, "buffers": min(_FUSION, 2 * gradients)}


def _zero(parts: dict[str, int], answer: dict[str, Any], stage: int, ranks: int) -> dict[str, int]:
    held = parts.get("parameters", 0)
    trained, width = _trained(answer), _width(answer)
    share = -(-trained // ranks)
    bucket = 2 * min(trained, _BUCKET * width)
    found = {name: size for name, size in parts.items() if name not in ("gradients", "buffers")}
    found["optimizer"] = -(-parts.get("optimizer", 0) // ranks) if stage else parts.get("optimizer", 0)
    found["gradients"] = trained if stage < 2 else share  # noqa: PLR2004
    found["buffers"] = bucket + (2 * share if stage else 0)
    if stage == 3:  # noqa: PLR2004
        found["parameters"] = -(-held // ranks)
        found["buffers"] += min(held, (_LIVE + _PREFETCH) * width)
    return found


def _trained(answer: dict[str, Any]) -> int:
    return int(answer["whole"]["trained"] * _width(answer))


def _width(answer: dict[str, Any]) -> int:
    return 8 if answer["precision"] == "fp64" else 4


def _traffic(answer: dict[str, Any], stage: int, ranks: int) -> dict[str, Any]:
    """Reduced and gathered once a step; under stage 3 gathered for each pass, and reduced after each micro-batch."""
    steps, traced = answer["traffic"]["steps"], answer["batch"]["traced"]
    size = _trained(answer) * (ranks - 1) / ranks
    each = 3 * size if stage == 3 else 0.0  # noqa: PLR2004
    sent = {str(micro): each * steps for micro in range(traced)}
    if not each:
        sent[str(traced - 1)] = 2 * size * steps
    side = "between" if answer["traffic"]["between"] else "within"
    return {"within": {}, "between": {}, "calls": {}, "steps": steps, side: sent}
