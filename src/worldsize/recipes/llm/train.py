"""Room: the training of a language model: settings to a run. All of it is the public interface; copy and change it."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import worldsize as ws
from worldsize.errors import DataError
from worldsize.recipes.llm import data, fitting, folder, fp8, hub, impl, lora, zero
from worldsize.recipes.llm.generate import Looks
from worldsize.recipes.llm.meter import Meter
from worldsize.recipes.llm.modes import NONE, Mode
from worldsize.recipes.llm.recompute import Recomputation

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from worldsize.recipes.llm.config import LLMConfig
    from worldsize.recipes.llm.data import Batch, Rows, Stream


_SHARE = 0.01
"""Which part of the rows is kept back where an evaluation is asked for, and not of what."""


def train(config: LLMConfig) -> dict[str, Any]:
    """Train as the settings say, from where the run folder stands.

    Returns:
        where the run ended, with the last evaluation.

    Raises:
        ConfigError, DataError, CheckpointError, LayoutError: what is set, what was found, what to do.
    """
    place, checkpoint, source = config.required()
    rest = None
    if config.deepspeed_config is not None:
        config, taken = zero.apply(config, ws.here().size)
        rest = taken.rest
        for note in taken.notes:
            _say(note)
    begun = folder.begun(place)
    if begun is not None:
        lora.refuse_others(begun, config)
        checkpoint = begun
    checkpoint = hub.local(checkpoint, download=config.download, weights=not config.from_scratch)
    tokenizer = hub.local(config.tokenizer or checkpoint, download=config.download, weights=False)
    config = config.model_copy(update={"init_ckpt": checkpoint, "tokenizer": tokenizer})
    own = impl.chosen(config, checkpoint, _device(config))
    rows = _rows(config, source, own, _say)
    held, kept = _parted(config, rows, own, begun)
    given = config.micro_batch if isinstance(config.micro_batch, int) else None
    run = ws.Run(
        place,
        global_batch=config.global_batch,
        micro_batch=given,
        duration=config.duration,
        seed=config.seed,
        strategy=config.strategy,
        tp=config.model_parallel_size,
        pp=config.pipe_parallel_size,
        cp=config.context_parallel_size,
        precision="bf16" if config.precision == fp8.NAME else config.precision,
        device=config.device,
        saving=ws.Saving(every=f"{config.save_steps}st" if config.save_steps else None),
        track=config.track or (),
        data=_loader(given, held, rows, shuffle=True) if given else None,
        accept=() if given else ("micro_batch",),
    )
    how = Recomputation(Mode.parse(config.activation_checkpointing))
    fresh = config.from_scratch or run.comm.broadcast(begun is not None)
    model = own.place(run, _options(config, rest, how), fresh=fresh)
    run.say(f"{own.told(packed=getattr(rows, 'packed', False))}; data: {_told(rows)}")
    optimizer = run.optimizer(lambda placed: _adamw(config, placed), model, clip=config.clip or None)
    run.schedule(optimizer, lambda made: _schedule(config, made, run.total_steps))
    bench = fitting.Bench(
        run, model, optimizer, how, own.losses, batch=partial(_longest, config, held, rows), device=_device(config)
    )
    micro = fitting.fit(run, config, bench)
    if ws.here().rank == 0:
        folder.keep(checkpoint, _tokenizer(config), place, lora.of(config), back=len(rows) - len(held))
    looks = _looks(config, place)
    meter = Meter(own.flops(config.max_seq_len), run.comm.size, _device(config))
    scores: dict[str, float] = {}
    loader = None if given else _loader(micro, held, rows, shuffle=True)
    for step in run.steps(loader, count=data.counted):
        own.moved(model)  # here, for a run that goes back to a commit moves them too
        for batch in step.micro_batches:
            step.backward(share=own.losses(model, batch).sum() / step.totals["tokens"], of="tokens")
        step.update()
        meter.add(step.totals["positions"])
        if _due(config.log_steps, step.index + 1, run.total_steps):
            run.log(meter.read(run.comm))
        if kept is not None and _due(config.eval_steps, step.index + 1, run.total_steps):
            own.moved(model)
            with meter.paused():
                scores = _evaluated(run, partial(own.losses, model), _loader(micro, kept, rows, shuffle=False))
            run.log(scores)
        if looks is not None and _due(config.generate_steps, step.index + 1, run.total_steps):
            own.moved(model)
            with meter.paused():
                looks.look(run, partial(own.logits, model), step.index + 1)
    return {**run.result, **scores}


def _looks(config: LLMConfig, place: Path) -> Looks | None:
    if not config.generate_steps or config.generate_prompts is None:
        return None
    return Looks(config.generate_prompts, config.generate_tokens, data.load_tokenizer(_tokenizer(config)), place)


def _evaluated(run: ws.Run, losses: Callable[[Batch], Tensor], loader: Any) -> dict[str, float]:
    """The mean loss over tokens, and its exponential."""

    def scored(batch: Batch) -> dict[str, Any]:
        return {"eval_loss": (losses(batch).sum(), data.counted(batch)["tokens"])}

    found = run.evaluate(scored, loader)
    return {**found, "eval_perplexity": math.exp(min(found["eval_loss"], 700.0))}


def _rows(config: LLMConfig, source: Path, own: impl.Impl, say: Callable[[str], None]) -> Rows | Stream:
    wanted = data.Wanted(
        config.max_seq_len,
        packed=config.packing and config.context_parallel_size == 1 and own.packs,
        multiple=config.context_parallel_size,
        over=config.loss_over,
        bad=config.bad_lines,
    )
    cache = config.cache_dir or Path("~/.cache/worldsize/tokens").expanduser()
    return data.rows_of(source, _tokenizer(config), wanted, vocabulary=own.vocabulary, cache=cache, say=say)


def _parted(config: LLMConfig, rows: Any, own: impl.Impl, begun: Path | None) -> tuple[Any, Any]:
    """What is trained on, and what is kept back or given to evaluate on."""
    count = _back(config, len(rows), begun)
    held: Any = rows
    kept: Any = None
    if count:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
        held, kept = (torch.utils.data.Subset(rows, sorted(part)) for part in (order[count:], order[:count]))
    if config.eval_data is not None:
        kept = _rows(config, config.eval_data, own, _say)
    return held, kept


def _back(config: LLMConfig, there: int, begun: Path | None) -> int:
    """How many rows are kept back: as many as when the run began, where nothing else is said."""
    count = round(there * config.eval_share)
    if begun is not None and "eval_share" not in config.model_fields_set:
        count = folder.kept_back(begun)
        if config.eval_steps and config.eval_data is None and not count:
            _say("eval_steps has no effect: this run began without rows kept back. Do: give --eval_data")
        return count if count < there else 0  # of other data, which is refused with its facts where the run begins
    if config.eval_data is not None:
        return 0
    if config.eval_steps and "eval_share" not in config.model_fields_set and there > 1:
        count = max(1, round(there * _SHARE))
        _say(f"eval_steps without eval_data: {count:,} of {there:,} rows are kept back (eval_share {_SHARE:g})")
    if count == there or (config.eval_steps and not count):
        raise DataError(
            f"eval_share {config.eval_share:g} leaves none to {'train' if count else 'evaluate'} on",
            found=f"{there:,} rows", do="choose another share, or give --eval_data",
        )  # fmt: skip
    return count


def _longest(config: LLMConfig, rows: Any, whole: Rows | Stream, count: int) -> Batch:
    """So many rows, as long as there may be."""
    found = whole.collate([rows[index % len(rows)] for index in range(count)])
    length = max(config.max_seq_len, found["tokens"].shape[1])
    places = torch.arange(length) % found["tokens"].shape[1]
    return {name: value[:, places] for name, value in found.items()}


def _loader(micro: int, rows: Any, whole: Rows | Stream, *, shuffle: bool) -> Any:
    return torch.utils.data.DataLoader(
        rows, batch_size=micro, shuffle=shuffle, collate_fn=getattr(rows, "collate", whole.collate)
    )


def _device(config: LLMConfig) -> torch.device:
    return torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _tokenizer(config: LLMConfig) -> Path:
    found = config.tokenizer or config.init_ckpt
    assert found is not None
    return found


def _options(config: LLMConfig, deepspeed: dict[str, Any] | None, how: Recomputation) -> dict[str, Any]:
    found = {
        "compile": config.compile,
        "activation_checkpointing": how if config.activation_checkpointing != NONE else False,
        "reshard": config.reshard,
        "schedule": config.schedule,
        "deepspeed": deepspeed,
    }
    return {name: value for name, value in found.items() if value is not None}


def _adamw(config: LLMConfig, model: nn.Module) -> torch.optim.AdamW:
    """Matrices decay, norms and biases do not."""
    wanted = [value for value in model.parameters() if value.requires_grad]
    groups = [
        {"params": [value for value in wanted if value.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [value for value in wanted if value.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        # A stage of a pipeline may have nothing to train, as the head beside adapters; its optimizer is there all the same.
        [group for group in groups if group["params"]] or groups[:1],
        config.lr,
        (config.beta1, config.beta2),
        config.eps,
        fused=True if config.use_fused_ops else None,
        foreach=None if config.use_fused_ops else False,
    )


def _schedule(config: LLMConfig, optimizer: Any, total: int) -> Any:
    """Up in a line or as a logarithm, then down by half a cosine, by a line, or not at all."""
    least, warm = config.min_lr_share, config.warmup_steps

    def share(step: int) -> float:
        if step < warm:
            log = config.warmup_shape == "log"
            risen = math.log(step + 1) / math.log(max(2, warm)) if log else (step + 1) / warm
            return config.warmup_min_share + (1 - config.warmup_min_share) * risen
        done = min(1.0, (step - warm) / max(1, total - warm))
        fall = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[
            config.lr_schedule
        ]
        return fall if config.lr_schedule == "constant" else least + (1 - least) * fall

    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def _due(every: int, step: int, total: int) -> bool:
    return bool(every) and (step % every == 0 or step == total)


def _told(rows: Rows | Stream) -> str:
    facts = rows.facts
    return f"{facts['rows']:,} rows, {facts['tokens']:,} tokens"


def _say(text: str) -> None:
    if ws.here().rank == 0:
        print(f"worldsize: {text}", flush=True)  # noqa: T201 - before there is a run
