"""The real handwritten digits that scikit-learn ships (1,797 images of 8 x 8 pixels), and a net that reads them."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu
from torch.utils.data import TensorDataset

HOLD_OUT = 5


def load() -> tuple[TensorDataset, TensorDataset]:
    """(training set, held-out set): every fifth image is held out and never trained on."""
    found = load_digits()
    images = torch.tensor(found.images / 16, dtype=torch.float32)[:, None]
    labels = torch.tensor(found.target)
    held_out = torch.arange(len(labels)) % HOLD_OUT == 0
    return (
        TensorDataset(images[~held_out], labels[~held_out]),
        TensorDataset(images[held_out], labels[held_out]),
    )


class Net(nn.Module):
    """Two convolutions with batch normalisation, dropout, one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.second_norm = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.drop = nn.Dropout(0.25)
        self.last = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, 1, 8, 8) grey values from 0 to 1 -> (samples, 10) scores."""
        x = relu(self.first_norm(self.first(x)))
        x = max_pool2d(relu(self.second_norm(self.second(x))), 2)
        scores: Tensor = self.last(self.drop(x.flatten(1)))
        return scores
