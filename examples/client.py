"""Use a running engine: python -m examples.client ADDRESS_OR_RUN_DIR

The address is in the engine's ready line: client=ipc://…
"""

import signal
import sys

from frontend import Client, EngineError, RequestError, SamplingParams


def main(address: str) -> None:
    """Generate at once, as a stream, and with a request that is refused."""
    with Client(address) as client:
        print("model:", client.status().model)

        params = SamplingParams(temperature=0, max_tokens=16)
        for generation in client.generate(["One, two,", "Red, green,"], params):
            print(repr(generation.text), generation.usage)

        chat = [{"role": "user", "content": "Tell me a story."}]
        for delta in client.stream(chat, SamplingParams(temperature=0, max_tokens=200)):
            print(delta.text, end="", flush=True)
            if "." in delta.text:
                break  # leaving the loop aborts the request
        print()

        try:
            client.generate("Hello", SamplingParams(temperature=9))
        except RequestError as error:
            print(error.code, error.param, error.message)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.client ADDRESS_OR_RUN_DIR")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end in silence behind `| head`
    try:
        main(sys.argv[1])
    except EngineError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
