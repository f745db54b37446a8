"""The Python client library: a session core without I/O, and three ways to use it.

    Client         blocks its caller
    AsyncClient    for asyncio
    LLM            starts an engine of its own and uses a Client

    prompts ──► requests.py ──Generate──► session.py ──frames──► link.py, async_link.py
    results ◄── batch.py ◄──Delta, Ended── session.py ◄──frames──

It imports neither torch nor transformers nor the web stack.
"""
