"""A machine without a GPU for the paged engine: Triton's interpreter runs the kernels on the CPU, a step is
run instead of replayed, and memory is torch's own."""

from dataclasses import dataclass

from qerl.rollout.paged.memory import PlainMemory


@dataclass(frozen=True)
class Eager:
    """A machine on which keys and values may take so many bytes."""

    bytes_for_cache: int = 1 << 24

    def why_not(self, model):
        return None

    def cache_bytes(self, model, freed=0):
        return self.bytes_for_cache

    def memory(self, size):
        return PlainMemory(size, "cpu")

    def graphs(self):
        return NoGraphs()


class Forgetful(Eager):
    """Memory that is given up comes back as NaN, as on a GPU it might."""

    def memory(self, size):
        return Forgotten(size, "cpu")


class Forgotten(PlainMemory):
    """See `Forgetful`."""

    given_up = False

    def give_up(self):
        self.given_up = True
        self._bytes.fill_(255)

    def take_back(self):
        self.given_up = False


class NoGraphs:
    """Steps that are run instead of replayed."""

    def capture(self, run, device):
        return run
