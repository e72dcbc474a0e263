"""`StarOrVar`: the trials by which AR-Topk's `_auto` schemes choose between STAR and VAR."""

from __future__ import annotations

import math

from torch import Tensor

# Turns of the round-robin per trial. The first turn sends what the other choice left in the residuals; only the second
# one is measured.
_TRIAL_TURNS = 2
# Trials that one cycle is as long as. Two of them are trials, so the worse choice is in force in 1 step of 20.
_CYCLE_TRIALS = 20


class StarOrVar:
    """Chooses STAR or VAR for the next step, by which of them sends more of the gradient's energy.

    Each choice is tried for 2N steps. The one with the larger gain, summed over the second half of its trial, stays for
    the rest of 40N steps; then the trials start again. If the gains are equal it is STAR, which takes a latency less.

    Departure from the paper (Flexible Communication), which leaves it to future work to switch by test performance:
    that needs a test set and cannot tell the choices apart within an epoch. The compression gain |g_c|^2 / |g_e|^2 of
    the average is known at every step: the share of the error-fed gradient's energy that crosses the network now and
    not later. All ranks see the same sums, so they agree without a message.

    Checkpoints do not contain it: every new plan, every resumed run and every new density of dgc's warm-up begins with
    the trials.
    """

    def __init__(self, world_size: int) -> None:
        self._trial_steps = _TRIAL_TURNS * world_size
        self._step = 0
        self._gains = {False: 0.0, True: 0.0}

    @property
    def by_norm(self) -> bool:
        """True for VAR in the next step."""
        trial = self._step // self._trial_steps
        return self._gains[True] > self._gains[False] if trial > 1 else trial == 1

    def note(self, gain: float) -> None:
        """Record the gain of a step. Call it once per step."""
        if self._step == 0:
            self._gains = {False: 0.0, True: 0.0}
        trial, place = divmod(self._step, self._trial_steps)
        if trial <= 1 and place * _TRIAL_TURNS >= self._trial_steps:
            self._gains[self.by_norm] += gain
        self._step = (self._step + 1) % (_CYCLE_TRIALS * self._trial_steps)


def compression_gain(average_K: Tensor, fed_energy: float) -> float:
    """Return |g_c|^2 / |g_e|^2, or 0 where it has no meaning, as in steps that are not finite.

    The float is the same on all ranks: it is computed from a sum of integers, which does not depend on processor and
    number of threads as a sum of floats does.
    """
    largest = float(average_K.abs().max()) if average_K.numel() else 0.0
    if not (0 < fed_energy < math.inf and 0 < largest < math.inf):
        return 0.0
    _, exponent = math.frexp(largest)
    quantized_K = (average_K.double() * math.ldexp(1.0, 15 - exponent)).round().long()
    return math.ldexp(int(quantized_K.square().sum()), 2 * exponent - 30) / fed_energy
