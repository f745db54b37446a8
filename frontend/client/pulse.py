"""What a waiting client does by itself as time passes: ask whether the engine lives, try again.

No clock: whoever waits tells the time, in seconds on any clock that only goes forward.
"""

from frontend.client.errors import EngineGoneError
from frontend.client.session import Session

PROBES_PER_LIMIT = 6
"""Times the engine is asked for a sign of life before its silence counts as its end."""
RETRY_INTERVAL_S = 0.25
"""After a refusal for want of room, where nothing else of this client's is running."""


class Pulse:
    """Watches over a session while somebody waits for it."""

    def __init__(self, session: Session, *, silence_limit_s: float, now: float) -> None:
        """`silence_limit_s`: how long an engine may answer nothing, not even a status request."""
        self._session = session
        self._silence_limit_s = silence_limit_s
        self._probe_interval_s = silence_limit_s / PROBES_PER_LIMIT
        self._last_heard = now
        self._last_beat = now
        self._next_probe = now + self._probe_interval_s
        self._next_try: float | None = None

    def heard(self, now: float) -> None:
        """Note that something came."""
        self._last_heard = now
        self._next_probe = now + self._probe_interval_s

    def beat(self, now: float) -> float:
        """Do what is due, and return in how many seconds the next is.

        An engine that has been silent for too long fails the session. Before it has said Hello it
        owes nothing; and while nobody waited, or the program was busy with something else, it was
        not the engine that was silent.
        """
        if now - self._last_beat > 2 * self._probe_interval_s or not self._session.is_greeted:
            self.heard(now)
        self._last_beat = now
        if now - self._last_heard >= self._silence_limit_s:
            what = f"has answered nothing for {self._silence_limit_s:g} s"
            self._session.fail(EngineGoneError(self._session.address, what))
        if self._session.failure is not None:
            return 0.0
        if now >= self._next_probe:
            self._next_probe = now + self._probe_interval_s
            self._session.ask_status(_ignore)
        if not self._session.is_held_back:
            self._next_try = None
        elif self._next_try is None:
            self._next_try = now + RETRY_INTERVAL_S
        elif now >= self._next_try:
            self._next_try = None
            self._session.try_again()
        return max(0.0, min(self._next_probe, self._next_try or self._next_probe) - now)


def _ignore(_reply: object) -> None:
    """The silence is broken: that is all a probe is for."""
