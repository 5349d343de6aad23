"""Room: which of a model's modules is split over tensor ranks, and how: read from a plan, checked against the sizes. No ranks.

A plan maps names of modules to words (or torch's own `ParallelStyle` objects). A name may hold `*` for one part of a
path, or be a regular expression. It is given with the model, or the model carries one, as transformers' models do.

Shoeybi et al., "Megatron-LM", 2019 (columns and rows); Korthikanti et al., MLSys 2023 (sequence parallel).
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from worldsize.errors import ConfigError, LayoutError
from worldsize.strategies.base import brief

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

OWN = ("columns", "columns_entered", "columns_entered_sequence")
"""Columns of a module whose own code does the rest: plain tensors go in and out of it."""
COLUMNS = ("colwise", "colwise_rep", "colwise_sequence", "colwise_rep_sequence", *OWN)
ROWS = ("rowwise", "rowwise_whole", "rowwise_sequence")
SUMMED = ("sequence", "summed")
WORDS = (*COLUMNS, *ROWS, *SUMMED, "gather_sequence", "entered", "entered_sequence", "replicate")
_ALIASES = {
    "colwise_gather_output": "colwise_rep",
    "embedding_rowwise": "rowwise",
    "rowwise_rep": "rowwise_whole",
    "rowwise_split_input": "rowwise_whole",
    "sequence_parallel": "sequence",
    "replicated_with_grad_allreduce": "summed",
    "replicated": "replicate",
}
_HEADS = ("num_heads", "n_heads", "n_head", "heads", "nhead", "num_attention_heads")
_HEAD_SIZES = ("head_dim", "head_size", "d_head")
_DO = 'run.model(Net, tp_plan={"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}), or let the model carry one'

Style = str | ParallelStyle
Plan = dict[str, Style]


def resolve(model: nn.Module, given: Mapping[str, Any] | None, parts: int, *, whole: bool = True) -> Plan:
    """Find the style of every module that a plan names.

    Args:
        model: the model, before anything is laid over ranks.
        given: the plan that came with it, or None for the model's own.
        parts: over how many ranks tensors are split.
        whole: whether `model` is all that the plan speaks of; a pipeline's stage is not.

    Raises:
        ConfigError: there is no plan, or it names nothing that there is, or in unknown words.
        LayoutError: sizes do not divide by `parts`.
    """
    plan = carried(model) if given is None else dict(given)
    if not plan:
        raise ConfigError("tp needs a plan that says how the model's layers are split", found="none", do=_DO)
    names = [name for name, _ in model.named_modules() if name]
    found: Plan = {}
    for pattern, value in plan.items():
        matched = [name for name in names if _regex(pattern).fullmatch(name)]
        if not matched and whole:
            raise _unmatched(pattern, names)
        for name in matched:
            style = _style(name, value)
            if found.get(name, style) != style:
                raise ConfigError("two names of the tp plan mean one module, differently", found=name)
            found[name] = style
    _refuse_kinds(model, found)
    found |= _tied_embeddings(model, found)
    _refuse_sizes(model, found, parts)
    return found


def carried(model: nn.Module) -> dict[str, Any]:
    """The plan that a model brings: its `tp_plan` (attribute, property or method), or what transformers keeps for it."""
    own = getattr(model, "tp_plan", None)
    own = own() if callable(own) else own
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    prefix = getattr(model, "base_model_prefix", "")
    start = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    inner = {f"{start}{name}": value for name, value in (base or {}).items()}
    return inner | dict(own or getattr(model, "_tp_plan", None) or {})


def sharing(model: nn.Module) -> list[dict[nn.Module, str]]:
    """For each parameter that several modules own: them, with its name there."""
    owners: dict[nn.Parameter, dict[nn.Module, str]] = {}
    for module in model.modules():
        for name, value in module._parameters.items():  # noqa: SLF001 - the public lists name a shared one once
            if value is not None:
                owners.setdefault(value, {})[module] = name
    return [found for found in owners.values() if len(found) > 1]


def head_sizes(model: nn.Module, plan: Plan) -> set[int]:
    """How long a head is, of those projections split by columns whose parents say how many heads they have."""
    found = set[int]()
    for name, style in plan.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear) and style in COLUMNS:
            heads = _heads(model.get_submodule(name.rpartition(".")[0]), module.out_features)
            found |= {module.out_features // heads} if heads else set()
    return found


def _regex(pattern: str) -> re.Pattern[str]:
    if re.search(r"[\\\[\](){}|+^$?]", pattern):
        try:
            return re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"a name in the tp plan is no regular expression: {error}", found=pattern) from None
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))


def _unmatched(pattern: str, names: list[str]) -> ConfigError:
    general = sorted({re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names})
    near = difflib.get_close_matches(pattern, general, n=3, cutoff=0.3) or general[:3]
    return ConfigError(
        "the tp plan names modules that the model does not have", found=pattern, do=f"nearest are {', '.join(near)}"
    )


def _style(name: str, value: Any) -> Style:
    if isinstance(value, ParallelStyle):
        return value
    word = _ALIASES.get(value, value) if isinstance(value, str) else value
    if word not in WORDS:
        raise ConfigError(
            f"the tp plan's word for {name} is not known",
            found=repr(value),
            do=f"choose one of {', '.join(WORDS)}, or a ParallelStyle of torch",
        )
    found: str = word
    return found


def _refuse_kinds(model: nn.Module, plan: Plan) -> None:
    for name, style in plan.items():
        module = model.get_submodule(name)
        split = isinstance(module, nn.Linear | nn.Embedding) or (
            isinstance(module, nn.Dropout) and style == "colwise"
        )
        if style in (*COLUMNS, *ROWS) and not split:
            raise ConfigError(
                f"the tp plan says {style!r} for a module that it cannot split",
                found=f"{name}: {type(module).__name__}",
                do="name nn.Linear and nn.Embedding modules, or give a ParallelStyle of torch",
            )


def _tied_embeddings(model: nn.Module, plan: Plan) -> Plan:
    """An embedding that shares its weight with a head that is split by columns is split over the vocabulary too."""
    names = {module: name for name, module in model.named_modules()}
    found: Plan = {}
    for owners in sharing(model):
        planned = [plan[names[module]] for module in owners if names[module] in plan]
        if any(style in COLUMNS for style in planned):
            found |= {
                names[module]: "rowwise"
                for module in owners
                if isinstance(module, nn.Embedding) and names[module] not in plan
            }
    return found


def _refuse_sizes(model: nn.Module, plan: Plan, parts: int) -> None:
    wrong = [line for name, style in plan.items() for line in _indivisible(model, name, style, parts)]
    if wrong:
        raise LayoutError(
            f"tp={parts} does not divide what the plan splits",
            found=brief(wrong),
            do="choose a tp that divides them, or leave these modules out of the plan",
        )


def _indivisible(model: nn.Module, name: str, style: Style, parts: int) -> Iterator[str]:
    module = model.get_submodule(name)
    if isinstance(module, nn.Embedding):
        what, size = ("embedding_dim", module.embedding_dim) if style in COLUMNS else ("rows", module.num_embeddings)
    elif isinstance(module, nn.Linear):
        what, size = (
            ("out_features", module.out_features) if style in COLUMNS else ("in_features", module.in_features)
        )
    else:
        return
    if style not in (*COLUMNS, *ROWS):
        return
    heads = _heads(model.get_submodule(name.rpartition(".")[0]), size)
    if size % parts:
        yield f"{name} with {what} {size}"
    elif heads is not None and heads % parts:
        yield f"{name} with {heads} heads"


def _heads(parent: nn.Module, size: int) -> int | None:
    """Into how many heads the parent cuts a vector of that size, where it says so in the usual words."""
    lengths = [getattr(parent, name) for name in _HEAD_SIZES if type(getattr(parent, name, None)) is int]
    if lengths and lengths[0] and size % lengths[0] == 0:
        return int(size // lengths[0])
    counts = [getattr(parent, name) for name in _HEADS if type(getattr(parent, name, None)) is int]
    return int(counts[0]) if counts and counts[0] and size % counts[0] == 0 else None
