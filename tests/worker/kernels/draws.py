"""Rows to sample, by a kernel and by `worker.sampler`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels.drawing import draw_tokens
from worker.kernels.filtering import draw_filtered_tokens
from worker.sampler import Samples, SamplingRows, sample


@dataclass(frozen=True)
class Rows:
    """Logits and what each row's slot says. All on CPU; slots are the rows in reverse."""

    logits: Tensor
    temperatures: Tensor
    seeds: Tensor
    positions: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def take(self, index):
        """Return some of the rows."""
        return Rows(*(column[index] for column in vars(self).values()))

    def expected(self) -> Samples:
        """Return what `worker.sampler` draws."""
        vocab_size = self.logits.shape[1]
        filters = (self.top_k < vocab_size) | (self.top_p < 1) | (self.min_p > 0)
        samples = self.temperatures > 0
        limited = self.top_k[filters & samples & (self.top_k < vocab_size)]
        params = SamplingRows(
            temperatures=self.temperatures,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seeds=self.seeds,
            positions=self.positions,
            unfiltered=(samples & ~filters).nonzero().flatten(),
            filtered=(samples & filters).nonzero().flatten(),
            max_top_k=int(limited.max()) if len(limited) else 0,
        )
        return sample(self.logits.float(), params)

    def drawn(self, device, *, filtered: bool, index_dtype=torch.int32) -> tuple[Tensor, Tensor]:
        """Return each row's last token and report, by the kernel."""
        num_rows = len(self.logits)
        slots = torch.arange(num_rows).flip(0).to(device, index_dtype)
        last_tokens = torch.full((num_rows + 1,), -7, device=device)
        reported = torch.full((num_rows,), -7, dtype=torch.int32, device=device)

        def by_slot(column: Tensor) -> Tensor:
            return torch.cat((column.flip(0), column[:1])).to(device)

        parameters = [by_slot(column) for column in (self.temperatures, self.seeds)]
        places = {"slots": slots, "last_tokens": last_tokens, "reported": reported}
        args = (self.logits.to(device), *parameters, self.positions.to(device, index_dtype))
        if filtered:
            filters = [by_slot(column) for column in (self.top_k, self.top_p, self.min_p)]
            names = ("top_k", "top_p", "min_p")
            draw_filtered_tokens(*args, **dict(zip(names, filters, strict=True)), **places)
        else:
            draw_tokens(*args, **places)
        assert last_tokens[-1] == -7, "no row has the last slot"
        return last_tokens[:num_rows].flip(0).cpu(), reported.cpu()


def make_rows(num_rows: int, vocab_size: int, dtype=torch.float32, *, spread: float = 3.0) -> Rows:
    """Random rows without filters; every fourth is greedy."""
    generator = torch.Generator().manual_seed(num_rows + vocab_size)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * spread
    temperatures = torch.tensor([0.7, 1.0, 1.3, 0.0]).repeat(num_rows)[:num_rows]
    return Rows(
        logits=logits.to(dtype),
        temperatures=temperatures,
        seeds=torch.randint(-(2**62), 2**62, (num_rows,), generator=generator),
        positions=torch.randint(2**20, (num_rows,), generator=generator),
        top_k=torch.full((num_rows,), vocab_size),
        top_p=torch.ones(num_rows),
        min_p=torch.zeros(num_rows),
    )


def check(rows: Rows, device, *, filtered: bool, index_dtype=torch.int32) -> None:
    """Fail if the kernel draws other tokens or reports other failures than `worker.sampler`."""
    expected = rows.expected()
    last_tokens, reported = rows.drawn(device, filtered=filtered, index_dtype=index_dtype)
    good = ~expected.failed
    assert last_tokens[good].tolist() == expected.tokens[good].tolist()
    assert reported.tolist() == expected.tokens.masked_fill(expected.failed, -1).tolist()
    assert ((last_tokens >= 0) & (last_tokens < rows.logits.shape[1])).all()
