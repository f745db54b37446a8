"""A progress bar for many prompts, on stderr."""

import sys
from types import TracebackType
from typing import Self

from tqdm import tqdm

from frontend.client.results import Generation


class ProgressBar:
    """Shows prompts done, prompts a second and tokens a second."""

    def __init__(self, total: int, *, is_shown: bool) -> None:
        """`total` in prompts."""
        self._bar: tqdm[None] = tqdm(
            total=total,
            desc="prompts",
            unit=" prompts",
            file=sys.stderr,
            dynamic_ncols=True,
            disable=not is_shown,
        )
        self._prompt_tokens = 0
        self._output_tokens = 0

    def count(self, generation: Generation) -> None:
        """Note that a prompt is done."""
        self._prompt_tokens += generation.usage.prompt_tokens
        self._output_tokens += generation.usage.completion_tokens
        elapsed_s = self._bar.format_dict["elapsed"]
        if elapsed_s > 0:
            self._bar.set_postfix_str(
                f"in {self._prompt_tokens / elapsed_s:.0f} tok/s, "
                f"out {self._output_tokens / elapsed_s:.0f} tok/s",
                refresh=False,
            )
        self._bar.update(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
