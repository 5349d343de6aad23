"""Room: the settings of a training of a language model: one definition for the command line, YAML and Python. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import model_validator

from worldsize.errors import ConfigError
from worldsize.launch import fields
from worldsize.launch.fields import by
from worldsize.launch.given import Given
from worldsize.recipes.llm import modes

Text = Annotated[str | None, by(fields.text)]
Place = Annotated[Path | None, by(lambda value: Path(fields.text(value)).expanduser())]
Flag = Annotated[bool, by(fields.flag)]
Count = Annotated[int, by(fields.count, 1)]
Whole = Annotated[int, by(fields.count)]
Number = Annotated[float, by(fields.number)]
Share = Annotated[float, by(fields.number, 0.0, 1.0)]


class LLMConfig(Given):
    """One training. Frozen; whatever contradicts itself is refused when it is made, with both values."""

    NAME: ClassVar[str] = "llm settings"

    output_dir: Place = None
    """The run folder: checkpoints, logs, numbers."""
    init_ckpt: Place = None
    """A Hugging Face folder: the model's config.json, weights and tokenizer. Weights are left alone with from_scratch."""
    data_path: Place = None
    """A file of JSON lines (text; prompt and completion; messages), or a folder of files of tokens (.npy, .bin)."""
    eval_data: Place = None
    """The same for evaluation. Not given: eval_share of the rows of data_path."""
    eval_share: Share = 0.0
    """Which part of the rows is kept back for evaluation where eval_data is not given. With eval_steps and neither: 0.01."""
    tokenizer: Place = None
    """A folder with the tokenizer. Not given: init_ckpt."""
    download: Flag = False
    """Fetch init_ckpt and tokenizer from the Hugging Face hub where they are OWNER/NAME[@REVISION] and no folders."""
    cache_dir: Place = None
    """Where tokens are kept. Not given: worldsize/tokens in the user's cache folder."""
    from_scratch: Flag = False
    """Begin with fresh weights of the shape in init_ckpt's config.json."""
    model_impl: Annotated[
        Literal["auto", "native", "transformers"], by(fields.choice, "auto", "native", "transformers")
    ] = "auto"
    """Which code computes the model: ours for families that it knows, transformers' for others (no pipeline, cp, fp8, LoRA)."""

    max_seq_len: Count = 2048
    """The most tokens of a row."""
    packing: Flag = True
    """Several documents in a row; attention and positions do not cross them."""
    loss_over: Annotated[Literal["completion", "all"], by(fields.choice, "completion", "all")] = "completion"
    """Of prompts and chats: learn what is answered, or all."""
    bad_lines: Annotated[Literal["error", "skip"], by(fields.choice, "error", "skip")] = "error"
    """Refuse a data file with lines that are no samples, or leave these out."""

    train_steps: Annotated[int | None, by(fields.count, 1)] = None
    """How many steps are made."""
    epochs: Annotated[float | None, by(fields.number, 1.0)] = None
    """How often the data is gone through, in place of train_steps. Not given: once."""
    global_batch: Count = 8
    """Rows of a step, over all ranks."""
    micro_batch: Annotated[int | Literal["auto"], by(modes.micro_batch)] = 1
    """Rows of a forward pass on one rank; auto: as many as fit, measured when the run is begun, and kept."""
    eval_steps: Whole = 0
    """Evaluate every so many steps, and at the end; 0: never."""
    save_steps: Whole = 0
    """Save every so many steps; 0: at the end, and when a stop is asked for."""
    generate_steps: Whole = 0
    """Every so many steps, and at the end, show what the model goes on with after each of generate_prompts; 0: never."""
    generate_prompts: Text = None
    """A file with a prompt a line, or a prompt."""
    generate_tokens: Count = 32
    """How many tokens follow a prompt."""
    log_steps: Count = 10
    """Write a line every so many steps."""
    track: Text = None
    """Where numbers go beside the run folder: tensorboard, mlflow, wandb, with commas between. See docs/track.md."""
    seed: Whole = 0
    """Of fresh weights, of the order of the data, of everything that is drawn."""

    lr: Number = 1e-4
    """The highest learning rate."""
    min_lr_share: Share = 0.1
    """Which part of it is left at the end."""
    lr_schedule: Annotated[
        Literal["cosine", "linear", "constant"], by(fields.choice, "cosine", "linear", "constant")
    ] = "cosine"
    """How it falls after warmup_steps."""
    warmup_steps: Whole = 0
    """Steps in which it rises."""
    warmup_shape: Annotated[Literal["linear", "log"], by(fields.choice, "linear", "log")] = "linear"
    """How it rises: by a line, or as a logarithm, the default of DeepSpeed's schedules."""
    warmup_min_share: Share = 0.0
    """Which part of it it rises from."""
    weight_decay: Number = 0.1
    """Of AdamW, for matrices; norms and biases have none."""
    beta1: Share = 0.9
    """Of AdamW."""
    beta2: Share = 0.95
    """Of AdamW."""
    eps: Number = 1e-8
    """Of AdamW."""
    clip: Annotated[float | None, by(fields.number)] = 1.0
    """The largest norm of all gradients together; 0: any."""

    lora_rank: Whole = 0
    """Train adapters of this rank beside the layers' projections, and nothing else; 0: train all weights."""
    lora_alpha: Annotated[float | None, by(fields.number)] = None
    """What adapters give is multiplied by lora_alpha / lora_rank. Not given: twice the rank."""
    lora_dropout: Share = 0.0
    """Of what goes into an adapter."""
    lora_targets: Annotated[str, by(fields.text)] = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    """Which projections have one, with commas between."""

    strategy: Text = None
    """How the model lies over ranks: single, ddp, fsdp, hsdp, zero1 ... See docs/strategies.md."""
    pipe_parallel_size: Count = 1
    """Over how many ranks the layers are laid, one after another (pipeline)."""
    model_parallel_size: Count = 1
    """Over how many ranks each layer is split (tensor parallel)."""
    sequence_parallel: Flag = True
    """Under it, not in a pipeline, tensor ranks also share rows between projections, and the vocabulary if it divides."""
    context_parallel_size: Count = 1
    """Over how many ranks each row is split."""
    schedule: Text = None
    """The order of work of a pipeline."""
    deepspeed_config: Place = None
    """DeepSpeed's JSON: its batch, optimizer, schedule, clipping and precision are the training's, the rest is DeepSpeed's."""
    precision: Annotated[
        Literal["bf16", "fp8", "fp32", "fp64", "fp16"], by(fields.choice, "bf16", "fp8", "fp32", "fp64", "fp16")
    ] = "bf16"
    """What is computed in; parameters and optimizer are in float32, or float64. fp8: projections, beside bf16."""
    fp8_scaling: Annotated[Literal["tensorwise", "rowwise"], by(fields.choice, "tensorwise", "rowwise")] = (
        "tensorwise"
    )
    """Under fp8: one factor for a tensor, the fastest, or one for a row, more exact."""
    device: Annotated[Literal["cpu", "cuda"] | None, by(fields.choice, "cpu", "cuda")] = None
    """Where it computes. Not given: on GPUs where there are some."""
    use_flash_attn: Flag = True
    """The fastest attention kernel that the device has; false: plain matrix products."""
    attention: Text = None
    """A kernel by name, in place of that: sdpa, flash, cudnn, math, flex."""
    use_fused_ops: Flag = True
    """Norms, rotary positions, head with loss (never all logits at once) and optimizer in one pass each; false: operation by
    operation."""
    compile: Flag = False
    """Compile the layers."""
    reshard: Annotated[float, by(modes.reshard)] = 1.0
    """Under fsdp, free a layer's whole weights after its forward pass. false: hold them; 0.5: hold those of the last half."""
    activation_checkpointing: Annotated[str, by(modes.activation_checkpointing)] = "none"
    """Compute again in the backward pass: none, selective, selective:2 (each second layer), full, auto (measured)."""
    memory_limit: Annotated[int | None, by(modes.memory)] = None
    """What auto may use on each rank, as in 70GiB. Not given: what the GPU has, or a share of what the host has free."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.train_steps is not None and self.epochs is not None:
            raise _both("train_steps", self.train_steps, "epochs", self.epochs)
        if self.eval_data is not None and self.eval_share:
            raise _both("eval_data", self.eval_data, "eval_share", self.eval_share)
        if self.generate_steps and self.generate_prompts is None:
            raise ConfigError(
                "generate_steps without generate_prompts", do="give --generate_prompts a prompt or a file"
            )
        if self.precision == "fp8":
            self._agree_in_eight()
        if self.lora_dropout and self.model_parallel_size > 1:
            raise _both("lora_dropout", self.lora_dropout, "model_parallel_size", self.model_parallel_size)
        if self.context_parallel_size > 1 and self.packing and "packing" in self.model_fields_set:
            raise _both("context_parallel_size", self.context_parallel_size, "packing", self.packing)
        if self.max_seq_len % self.context_parallel_size:
            raise ConfigError(
                "max_seq_len does not divide over the ranks that share a sequence",
                found=f"max_seq_len={self.max_seq_len}, context_parallel_size={self.context_parallel_size}",
                do="choose a multiple of it",
            )
        self._refuse_unmeasured()
        return self

    def _agree_in_eight(self) -> None:
        frozen = ("context_parallel_size", "lora_dropout") if self.lora_rank else ()
        for name in ("model_parallel_size", "pipe_parallel_size", "deepspeed_config", *frozen):
            if getattr(self, name) not in (0, 1, None):
                raise _both("precision", self.precision, name, getattr(self, name))
        if self.lora_rank and self.fp8_scaling != "tensorwise":
            raise _both("lora_rank", self.lora_rank, "fp8_scaling", self.fp8_scaling)

    def _refuse_unmeasured(self) -> None:
        """Raises ConfigError where trials before the first step could not be undone."""
        asked = [name for name in ("micro_batch", "activation_checkpointing") if getattr(self, name) == modes.AUTO]
        engine = (self.strategy or "").startswith(("deepspeed", "zero", "horovod"))
        if asked and (engine or self.pipe_parallel_size > 1):
            raise ConfigError(
                f"{asked[0]}=auto is measured under single, ddp, fsdp, hsdp and with tensor parallel",
                found=f"strategy {self.strategy}, pipe_parallel_size {self.pipe_parallel_size}",
                do=f"say what {asked[0]} shall be",
            )

    def required(self) -> tuple[Path, Path, Path]:
        """Where the run, the model and the data are. Raises ConfigError where one is not said."""
        for name in ("output_dir", "init_ckpt", "data_path"):
            if getattr(self, name) is None:
                raise ConfigError(f"--{name} is missing", do="give it on the command line or in the file of -c")
        assert self.output_dir is not None
        assert self.init_ckpt is not None
        assert self.data_path is not None
        return self.output_dir, self.init_ckpt, self.data_path

    @property
    def duration(self) -> str:
        """As `Run` takes it."""
        if self.train_steps is not None:
            return f"{self.train_steps}st"
        return f"{self.epochs or 1:.15g}ep"


def _both(one: str, first: Any, other: str, second: Any) -> ConfigError:
    return ConfigError(f"{one} and {other} exclude each other", found=f"{first} and {second}", do="give one of them")
