"""Room: one decoder for the families that `shape.FAMILIES` names, under the names of their Hugging Face checkpoints.

The loss is part of the model: the head's logits are the largest tensor of a training and need not exist whole, and a
pipeline hands over one number a position instead of them.

Touvron et al., "LLaMA", 2023; Zhang and Sennrich, "RMSNorm", 2019; Shazeer, "GLU Variants", 2020; Ainslie et al., "GQA", 2023.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from worldsize.recipes.llm import losses, rotary
from worldsize.recipes.llm.attention import Scaled
from worldsize.runtime.sharded import is_sharded, local

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from worldsize.recipes.llm.attention import Kernel, View
    from worldsize.recipes.llm.shape import Shape

Passing = tuple["Tensor", "Tensor | None", "Tensor | None", "Tensor | None"]
"""What one part of the model gives to the next: states (tokens before the first), labels, positions, documents."""


@dataclass(frozen=True, slots=True)
class Ways:
    """How the same numbers are computed.

    Attributes:
        kernel: of attention.
        fused: norms, rotary positions and the head's loss are one pass each; else one operation after another.
        compiled: the head's loss is compiled.
        parts: over how many tensor ranks sequences lie between projections, and the vocabulary; 1 where they are whole.
    """

    kernel: Kernel = field(default_factory=lambda: Scaled("sdpa"))
    fused: bool = True
    compiled: bool = False
    parts: int = 1


class Norm(nn.RMSNorm):
    """Root-mean-square norm, by torch's one operation for it or by several."""

    def __init__(self, size: int, eps: float, ways: Ways) -> None:
        super().__init__(size, eps)
        self._fused, self._least = ways.fused, eps

    def forward(self, states: Tensor) -> Tensor:
        """(..., size) -> the same."""
        if self._fused:
            return super().forward(states)
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._least)
        return (normed * self.weight).to(torch.promote_types(states.dtype, self.weight.dtype))


class Linear(nn.Linear):
    """A projection with fresh weights of the model's own spread."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, spread: float) -> None:
        self.spread = spread
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        """Normal with the model's spread; no bias."""
        nn.init.normal_(self.weight, std=self.spread)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, states: Tensor) -> Tensor:
        """(samples, length, inputs) -> (samples, length, outputs), or this tensor rank's part of them."""
        if type(self.weight) is nn.Parameter or is_sharded(states):
            return super().forward(states)
        return functional.linear(states, local(self.weight), None if self.bias is None else local(self.bias))


class Embedding(nn.Embedding):
    """Tokens to states."""

    def __init__(self, shape: Shape) -> None:
        self._spread, self._scale = shape.initial, shape.embedding_scale
        super().__init__(shape.vocabulary, shape.hidden)

    def reset_parameters(self) -> None:
        """Normal with the model's spread."""
        nn.init.normal_(self.weight, std=self._spread)

    def forward(self, tokens: Tensor) -> Tensor:
        """(samples, length) -> (samples, length, hidden)."""
        states = super().forward(tokens)
        return states * self._scale if self._scale != 1.0 else states


class Attention(nn.Module):
    """Causal self-attention with rotary positions, keys and values shared by groups of heads.

    Attributes:
        together: gives what query, key and value projections give, where that is computed as one.
    """

    together: Callable[[Tensor], Sequence[Tensor]] | None = None

    def __init__(self, shape: Shape, ways: Ways, window: int | None, *, rotated: bool) -> None:
        super().__init__()
        self._rotate = rotary.in_one_pass if ways.fused else rotary.rotate
        self.head_dim, self._scale, self._window, self._rotated = (
            shape.head_dim,
            shape.attention_scale,
            window,
            rotated,
        )
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            Linear(shape.hidden, outputs, bias=shape.qkv_bias, spread=shape.initial)
            for outputs in (queries, keys, keys)
        )
        self.o_proj = Linear(queries, shape.hidden, bias=shape.o_bias, spread=shape.initial)
        if shape.qk_norm:
            self.q_norm = Norm(shape.head_dim, shape.eps, ways)
            self.k_norm = Norm(shape.head_dim, shape.eps, ways)
        self._normed = shape.qk_norm

    def forward(self, states: Tensor, turn: tuple[Tensor, Tensor], view: View) -> Tensor:
        """(samples, length, hidden) -> the same."""
        samples, length, _ = states.shape
        found = (
            [projected(states) for projected in (self.q_proj, self.k_proj, self.v_proj)]
            if self.together is None
            else self.together(states)
        )
        query, key, value = (each.view(samples, length, -1, self.head_dim) for each in found)
        if self._normed:
            query, key = self.q_norm(query), self.k_norm(key)
        if self._rotated:
            query, key = self._rotate(query, *turn), self._rotate(key, *turn)
        seen = view.attend(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), self._window, self._scale
        )
        out: Tensor = self.o_proj(seen.transpose(1, 2).reshape(samples, length, -1))
        return out


class MLP(nn.Module):
    """A gated two-layer network (SwiGLU).

    Attributes:
        together: gives what all of it gives, where that is computed as one.
    """

    together: Callable[[Tensor], Tensor] | None = None

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden, shape.mlp, bias=shape.mlp_bias, spread=shape.initial)
        self.up_proj = Linear(shape.hidden, shape.mlp, bias=shape.mlp_bias, spread=shape.initial)
        self.down_proj = Linear(shape.mlp, shape.hidden, bias=shape.mlp_bias, spread=shape.initial)

    def forward(self, states: Tensor) -> Tensor:
        """(samples, length, hidden) -> the same."""
        if self.together is not None:
            return self.together(states)
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))
        return out


class Layer(nn.Module):
    """One block: attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape, ways: Ways, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(shape, ways, shape.windows[index], rotated=shape.rotated[index])
        self.mlp = MLP(shape)
        self.input_layernorm = Norm(shape.hidden, shape.eps, ways)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps, ways)
        self._scale = shape.residual_scale

    def forward(self, states: Tensor, turn: tuple[Tensor, Tensor], view: View) -> Tensor:
        """(samples, length, hidden) -> the same."""
        states = states + self._scaled(self.self_attn(self.input_layernorm(states), turn, view))
        return states + self._scaled(self.mlp(self.post_attention_layernorm(states)))

    def _scaled(self, states: Tensor) -> Tensor:
        return states * self._scale if self._scale != 1.0 else states


class Turning(nn.Module):
    """The frequencies of rotary positions. They are no parameters, and computed where the model is built without memory."""

    frequencies: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._rotary, self._size = shape.rotary, shape.head_dim
        self.register_buffer("frequencies", torch.empty(shape.head_dim // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """By the papers' formulas."""
        self.frequencies.copy_(rotary.frequencies(self._rotary, self._size))

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, see `rotary.tables`."""
        return rotary.tables(positions, self.frequencies, rotary.scale(self._rotary), dtype)


class Head(Linear):
    """States to logits, or to the losses of the tokens that follow."""

    def __init__(self, shape: Shape, ways: Ways) -> None:
        self._scale, self._fused, self._compiled = shape.logit_scale, ways.fused, ways.compiled
        super().__init__(shape.hidden, shape.vocabulary, bias=False, spread=shape.initial)

    def forward(self, states: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (samples, length, vocabulary); with labels one loss a position (samples, length), see `losses.plain`."""
        weight = local(self.weight)
        if labels is None:
            logits = functional.linear(states, weight)
            return self._gathered(logits * self._scale if self._scale != 1.0 else logits)
        if not self._fused:
            return losses.plain(states, weight, labels, self._scale, self._cut())
        return losses.chunked(states, weight, labels, self._scale, cut=self._cut(), compiled=self._compiled)

    def _cut(self) -> losses.Cut | None:
        if not is_sharded(self.weight):
            return None
        mesh = self.weight.device_mesh
        return losses.Cut(mesh.get_local_rank() * len(self.weight.to_local()), mesh.get_group())

    def _gathered(self, logits: Tensor) -> Tensor:
        if not is_sharded(self.weight):
            return logits
        from torch.distributed.tensor import Shard

        kind = type(self.weight)
        return kind.from_local(logits, self.weight.device_mesh, [Shard(2)], run_check=False).full_tensor()


@dataclass(frozen=True, slots=True)
class Run:
    """A run of consecutive parts of the decoder: all of it, or a stage of a pipeline.

    Attributes:
        embed, norm, head: None where another run has them.
        layers: between them.
        turning: of positions.
        kernel: of attention.
    """

    embed: Embedding | None
    layers: Sequence[nn.Module]
    norm: nn.Module | None
    head: Head | None
    turning: Turning
    kernel: Kernel

    def __call__(
        self, states: Tensor, labels: Tensor | None, positions: Tensor | None, documents: Tensor | None
    ) -> Tensor | Passing:
        """Tokens or states through the parts. See `Decoder.forward`."""
        length = states.shape[1]
        if self.embed is not None:
            states = self.embed(states)
        at = torch.arange(length, device=states.device)[None] if positions is None else positions
        turn, view = self.turning(at, states.dtype), self.kernel.view(length, documents, states.device)
        for layer in self.layers:
            states = layer(states, turn, view)
        if self.norm is not None:
            states = self.norm(states)
        return (states, labels, positions, documents) if self.head is None else self.head(states, labels)


class Section(nn.Module):
    """A run of parts as a module of its own, for a pipeline."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.embed, self.layers, self.norm, self.head = run.embed, nn.ModuleList(run.layers), run.norm, run.head
        self.turning, self._kernel = run.turning, run.kernel

    def forward(
        self,
        states: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor | tuple[Tensor | None, ...]:
        """See `Decoder.forward`. What stands last and is not there is not handed on: only tensors pass between stages."""
        run = Run(self.embed, list(self.layers), self.norm, self.head, self.turning, self._kernel)
        found = run(states, labels, positions, documents)
        if isinstance(found, torch.Tensor):
            return found
        there = next(count for count in range(len(found), 0, -1) if found[count - 1] is not None)
        return found[:there]


class Body(nn.Module):
    """The decoder without its head, for the names of its parts."""

    def __init__(self, shape: Shape, ways: Ways) -> None:
        super().__init__()
        self.embed_tokens = Embedding(shape)
        self.layers = nn.ModuleList(Layer(shape, ways, index) for index in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps, ways)
        self.turning = Turning(shape)


class Decoder(nn.Module):
    """A causal language model.

    Args:
        shape: sizes and switches.
        ways: how the same numbers are computed.
    """

    def __init__(self, shape: Shape, ways: Ways | None = None) -> None:
        super().__init__()
        self.shape, self.ways = shape, ways or Ways()
        self.model = Body(shape, self.ways)
        self.lm_head = Head(shape, self.ways)
        if shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Logits or losses.

        Args:
            tokens: (samples, length).
            labels: (samples, length), the token that follows each position, `losses.IGNORED` where none counts.
            position_ids: (samples or 1, length); 0, 1, ... where None.
            documents: (samples, length), a number for each document of a row: attention stays within; None for one.

        Returns:
            without labels logits (samples, length, vocabulary); with them losses (samples, length), 0 where ignored.
        """
        body = self.model
        layers, ways = list(body.layers), self.ways
        run = Run(body.embed_tokens, layers, body.norm, self.lm_head, body.turning, ways.kernel)
        found = run(tokens, labels, position_ids, documents)
        assert isinstance(found, torch.Tensor)
        return found

    @property
    def tp_plan(self) -> dict[str, str]:
        """How the model is split over tensor ranks: layers, and where `Ways.parts` says so all else too."""
        layer, end = "model.layers.*", "_sequence" if self.ways.parts > 1 else ""
        inner = {f"{layer}.self_attn": f"entered{end}", f"{layer}.mlp": f"entered{end}"}
        columns = {f"{layer}.self_attn.{name}_proj": "columns" for name in "qkv"}
        columns |= {f"{layer}.mlp.{name}_proj": "columns" for name in ("gate", "up")}
        rows = {f"{layer}.self_attn.o_proj": f"rowwise{end}", f"{layer}.mlp.down_proj": f"rowwise{end}"}
        norms = {f"{layer}.self_attn.{name}_norm": "summed" for name in "qk"} if self.shape.qk_norm else {}
        if self.ways.parts > 1:
            between = ("model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm")
            norms |= dict.fromkeys(between, "sequence")
            rows["model.embed_tokens"], columns["lm_head"] = "rowwise_sequence", "columns_entered_sequence"
        return {**inner, **columns, **rows, **norms}

    def pipeline_stages(self, n: int) -> list[nn.Module]:
        """Layers in n sections of about equal work; the embedding is in the first, norm and head in the last."""
        edges, body, last = _edges(self.shape, n), self.model, n - 1
        runs = [
            Run(
                body.embed_tokens if stage == 0 else None,
                list(body.layers)[edges[stage] : edges[stage + 1]],
                body.norm if stage == last else None,
                self.lm_head if stage == last else None,
                body.turning,
                self.ways.kernel,
            )
            for stage in range(n)
        ]
        return [Section(run) for run in runs]


def _edges(shape: Shape, stages: int) -> list[int]:
    """Where each section begins. The head costs as much as the layers that have as many parameters."""
    layer = (shape.parameters - shape.vocabulary * shape.hidden * (1 if shape.tied else 2)) / shape.layers
    head = min(shape.vocabulary * shape.hidden / layer, shape.layers / stages)
    share = (shape.layers + head) / stages
    inner = [
        min(max(math.floor(stage * share + 0.5), stage), shape.layers - (stages - stage - 1))
        for stage in range(1, stages)
    ]
    return [0, *inner, shape.layers]
