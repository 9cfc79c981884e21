"""Fine-tune a tiny MLA model on a CPU: two layers learn to find the word that matters.

    python examples/fine_tune.py

Nothing is asked of openmla: `MLAAttention` calls `mla_prefill`, whose tensors require gradients, so
they have them. Sequences of several lengths lie end to end in one batch, without padding. The
gradients of a step have the same bits every time.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from openmla.nn import Batch, MLAAttention, MLAConfig
from openmla.nn.rope import Rope
from openmla.planning.form import LayerDims

WORDS, HIDDEN, STEPS = 16, 64, 40
CONFIG = MLAConfig(
    hidden=HIDDEN,
    heads=4,
    dims=LayerDims(latent=32, nope=16, rope=8, v=16),
    q_lora=0,
    rope=Rope(width=8, theta=100.0),
    scale=24**-0.5,
)


class Model(nn.Module):
    """Embedding, two layers of attention with residuals, words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList(MLAAttention(CONFIG) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(3))
        self.words = nn.Linear(HIDDEN, WORDS)

    def forward(self, words: torch.Tensor, batch: Batch) -> torch.Tensor:
        x = self.embed(words)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x), batch.positions, batch=batch)
        return self.words(self.norms[-1](x))


def loss_of(model: Model, lengths: list[int]) -> torch.Tensor:
    """Loss of every sequence's last token, which must name the one word that is not 0."""
    ends = torch.tensor(lengths).cumsum(0)
    asked = torch.randint(1, WORDS, (len(lengths),))
    place = ends - 1 - torch.stack([torch.randint(n, ()) for n in lengths])
    words = torch.zeros(int(ends[-1]), dtype=torch.int64).index_copy(0, place, asked)
    return cross_entropy(model(words, Batch.of(lengths))[ends - 1], asked)


def main() -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(STEPS):
        loss = loss_of(model, [12, 7, 9, 30, 5, 10, 1, 22])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.2f}")
    print(f"after {STEPS} steps: loss {loss.item():.2f}, by chance {torch.tensor(WORDS).log():.2f}")


if __name__ == "__main__":
    main()
