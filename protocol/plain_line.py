"""Foreign text as part of a line of ours: in a log, an error message, a terminal."""


def plain_line(text: str, limit: int) -> str:
    """Return a text on one line of at most about `limit` characters, without anything invisible.

    What is not printable is escaped, so that a text can neither end its line and begin another nor
    command a terminal.
    """
    if len(text) > limit:
        text = text[:limit] + "…"
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )
