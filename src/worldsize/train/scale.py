"""Room: the loss scale of fp16 (Micikevicius et al., "Mixed Precision Training", 2018), the same on every rank.

torch's GradScaler looks for overflow in each rank's own gradients; here the norm of all gradients is looked at, which is
one number for all ranks under every strategy, so that they skip together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class LossScale:
    """Doubles after `interval` good steps, halves after an overflow."""

    value: float = 65536.0
    interval: int = 2000
    good: int = 0

    def judge(self, *, finite: bool) -> bool:
        """Move the scale after a step's norm is known. Returns whether the step is made."""
        if not finite:
            self.value, self.good = max(self.value / 2, 1.0), 0
            return False
        self.good += 1
        if self.good == self.interval:
            self.value, self.good = self.value * 2, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"value": self.value, "good": self.good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where it was."""
        self.value, self.good = float(state["value"]), int(state["good"])
