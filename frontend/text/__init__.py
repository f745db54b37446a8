"""The text process: tokenizing and chat templates, in a child that may be killed at any time.

A tokenizer holds the interpreter for as long as its text is long, a template can loop for ever,
and both come from files of strangers: so the frontend gives each job to this process, and a
deadline.
"""
