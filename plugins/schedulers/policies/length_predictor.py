"""How many tokens a request will produce, learnt from those that ended: running means, the same for the same history."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_GROUPS = 4096  # a user's name is the client's to choose: the group that learnt nothing for longest is forgotten
TRUST_AFTER = 4  # requests; a group's own mean counts as much as everybody's once so many of it have ended


@dataclass(slots=True)
class RunningMean:
    """The mean of what was learnt, in which the last `memory` values count most: older ones fade geometrically."""

    count: int = 0
    mean: float = 0.0

    def learn(self, value: float, memory: int) -> None:
        self.count = min(self.count + 1, memory)
        self.mean += (value - self.mean) / self.count


class LengthPredictor:
    """A mean for each (user, power of two of the prompt's length), drawn towards that of all requests while few of the group
    have ended. Before anybody has ended, the most that the request may produce. O(1) a call; memory bounded by MAX_GROUPS.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._all = RunningMean()
        self._groups: OrderedDict[tuple[str, int], RunningMean] = OrderedDict()  # the one that learnt last is last

    def learn(self, user: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """A request ended."""
        name = user, num_prompt_tokens.bit_length()
        group = self._groups.setdefault(name, RunningMean())
        group.learn(num_output_tokens, self._memory)
        self._all.learn(num_output_tokens, self._memory)
        self._groups.move_to_end(name)
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)

    def predict(self, user: str, num_prompt_tokens: int, max_tokens: int) -> float:
        """Output tokens in all, at most `max_tokens`."""
        if not self._all.count:
            return float(max_tokens)
        group = self._groups.get((user, num_prompt_tokens.bit_length()))
        mean = self._all.mean
        if group is not None:
            mean += (group.mean - mean) * group.count / (group.count + TRUST_AFTER)
        return min(mean, float(max_tokens))
