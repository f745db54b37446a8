"""Log-probabilities of a step's rows, on their way from the device to the wire."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from protocol.columns import pack_int32
from protocol.messages import LogprobColumns
from worker.step_rows import Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Log-probabilities of some tokens, each its own first; a token may want fewer than there are.

    What is said of the tensors, `on_device`, also holds of their copies on the host.
    """

    rows: Int32Array
    """[n] the plan's."""
    positions: Int32Array
    """[n] of the token, in prompt + output."""
    counts: Int32Array
    """[n] how many values each wants."""
    on_device: tuple[Tensor, ...]
    """Ids, [n, most] int32, and values, [n, most] float32; perhaps ranks, [n] int32."""

    def columns(self, copies: Sequence[Tensor], failed: Sequence[int]) -> LogprobColumns | None:
        """Return the columns of all but the failed rows, None if that is none.

        `copies` are the tensors, on the host.
        """
        kept = ~np.isin(self.rows, list(failed))
        if not kept.any():
            return None
        ids, values, *ranks = (tensor.numpy() for tensor in copies)
        counts = self.counts[kept]
        # Rows that want fewer than the widest take the first of theirs.
        is_wanted = np.arange(ids.shape[1]) < counts[:, None]
        return LogprobColumns(
            rows=self.rows[kept].tobytes(),
            positions=self.positions[kept].tobytes(),
            n=pack_int32(counts.tolist()),
            ids=ids[kept][is_wanted].tobytes(),
            values=values[kept][is_wanted].tobytes(),
            ranks=ranks[0][kept].tobytes() if ranks else b"",
        )
