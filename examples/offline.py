"""Generate with an engine of one's own: python -m examples.offline [MODEL]"""

import signal
import sys

from frontend import LLM, EngineError, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "Once upon a time",
]


def main(model: str) -> None:
    """Start an engine, generate from all prompts at once, print what came, stop."""
    with LLM(model) as llm:
        params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=24)
        for generation in llm.generate(PROMPTS, params):
            print(f"{generation.prompt!r} → {generation.text!r}")

        question = [{"role": "user", "content": "What is 2 + 2? Answer with a number."}]
        (answer,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=24))
        print(answer.text)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end in silence behind `| head`
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "")
    except EngineError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
