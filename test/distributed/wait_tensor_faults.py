"""What becomes of a wait when something goes wrong, in the torch that runs this file.

    python wait_tensor_faults.py [NAME …]

prints JSON: for each fault and each way to run the program, what it ended in. Each one runs in
processes of its own, forked from one that has done nothing but import. The faults that are real
have two gloo ranks; the others have a lazy group, whose Works do as they are told.
"""

import contextlib
import gc
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path


# A pool of compilers does not survive a fork.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import torch
import torch._inductor.compile_fx  # before the forks, since each would take seconds for it
import torch._inductor.graph
import torch.distributed as dist
import torch.distributed._functional_collectives  # noqa: F401  (registers the ops' formulas)


sys.path.insert(0, str(Path(__file__).parent))
from lazy_process_group import Fate, is_poison, lazy_group, Script, work_registry_size


c10d = torch.ops._c10d_functional
# How long a wait may take before its group gives up, and when the test gives up on the wait.
TIMEOUT = timedelta(seconds=2)
HANG = 60
WAYS = ("eager", "inductor")
ONES = torch.ones(4)


def program(group: str, way: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The one whose wait is ignored; compiled, it waits in Inductor's code."""

    def fn(x):
        y = c10d.all_reduce(x * 1, "sum", group)
        c10d.wait_tensor(y)
        return y * 2

    return fn if way == "eager" else torch.compile(fn, backend=way, fullgraph=True)


def ended(call: Callable[[], object]) -> str:
    """How a call ended, in words that do not hold numbers or addresses."""
    start = time.monotonic()
    try:
        result = call()
        how = "poison" if is_poison(result) else "right" if bool((result == result.flatten()[0]).all()) else "wrong"
    except BaseException as e:
        message = str(e).lower()
        words = ("timed out", "timeout", "aborted", "link down", "closed by peer", "reset by peer", "can't allocate", "wait_tensor_functional")
        word = next((w for w in words if w in message), message.splitlines()[0] if message else "")
        # Gloo says either, as it happens to notice.
        word = {"reset by peer": "closed by peer", "timeout": "timed out"}.get(word, word)
        how = f"{type(e).__name__}: {word}"
    if time.monotonic() - start > TIMEOUT.total_seconds() + 10:
        how += ", late"
    return f"{how}; {work_registry_size()} left"


@contextlib.contextmanager
def lazy(fate: Fate = Fate(), timeout: timedelta = TIMEOUT):
    # The first collective is the one that Inductor's code is tried with.
    script = Script(fate=lambda entry: fate if entry.number else Fate())
    with lazy_group(allow_pending=True, timeout=timeout, script=script) as group:
        yield group


def warm(group: str, way: str) -> Callable[[torch.Tensor], torch.Tensor]:
    fn = program(group, way)
    fn(ONES)
    return fn


def work_fails(way):
    with lazy(Fate(error=RuntimeError("link down"))) as group:
        fn = warm(group, way)
        return ended(lambda: fn(ONES))


def never_finishes(way):
    with lazy(Fate(never=True)) as group:
        fn = warm(group, way)
        return ended(lambda: fn(ONES))


def aborted_in_a_wait(way):
    with lazy(Fate(never=True), timedelta(minutes=5)) as group:
        fn = warm(group, way)
        threading.Timer(0.3, dist.group.WORLD.abort).start()
        return ended(lambda: fn(ONES))


def interrupted_in_a_wait(way):
    with lazy(Fate(never=True), timedelta(minutes=5)) as group:
        fn = warm(group, way)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        first = ended(lambda: fn(ONES))
    with lazy() as group:
        return f"{first}, then {ended(lambda: warm(group, way)(ONES))}"


def group_destroyed_with_a_wait_pending(way):
    with lazy() as group:
        y = c10d.all_reduce(ONES, "sum", group)
    return ended(lambda: waited(y, way))


def waiter(way):
    """What waits for its argument; compiled already."""

    def fn(y):
        c10d.wait_tensor(y)
        return y * 2

    fn = fn if way == "eager" else torch.compile(fn, backend=way, fullgraph=True)
    fn(ONES.clone())
    return fn


def waited(y, way):
    return waiter(way)(y)


def exception_between_issue_and_wait(way):
    with lazy() as group:
        kept = []

        def fn(x):
            kept.append(c10d.all_reduce(x, "sum", group))
            raise ValueError("between")

        first = ended(lambda: fn(ONES))
        return f"{first}, then {ended(lambda: waited(kept[0], way))}"


def waited_in_another_thread(way):
    with lazy(Fate(delay=0.2)) as group:
        c10d.wait_tensor(c10d.all_reduce(ONES, "sum", group))
        y = c10d.all_reduce(ONES, "sum", group)
        thread = threading.Thread(target=c10d.wait_tensor, args=(y,))
        thread.start()
        thread.join(HANG)
        return ended(lambda: waited(y, way))


def two_threads_wait_for_one_tensor(way):
    with lazy(Fate(delay=1)) as group:
        fn = waiter(way)
        c10d.wait_tensor(c10d.all_reduce(ONES, "sum", group))
        y = c10d.all_reduce(ONES, "sum", group)
        thread = threading.Thread(target=c10d.wait_tensor, args=(y,))
        thread.start()
        time.sleep(0.1)
        # The first has taken the Work from the registry, so the second finds nothing to wait for.
        second = ended(lambda: fn(y))
        thread.join(HANG)
        return f"{second}, then {ended(lambda: y)}"


def freed_in_flight(way):
    with lazy() as group:
        fn = warm(group, way)
        c10d.all_reduce(ONES, "sum", group)
        gc.collect()
        left = work_registry_size()
        return f"{left} while in flight, then {ended(lambda: fn(ONES))}"


def no_memory_for_the_functional_wait(way):
    """Its copy fails, but the wait was first: nothing is pending, the tensor itself is right."""
    with lazy() as group:
        y = torch.ones(64 << 20)
        # A Work is one for the whole storage. This one needs no memory to speak of itself.
        c10d.all_reduce_(y[:4], "sum", group)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), limits[1]))
        try:
            first = ended(lambda: c10d._wait_tensor_functional(y))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        return f"{first}, then {ended(lambda: waited(y[:4], way))}"


# --- two gloo ranks: what rank 0 sees, and what rank 1 does --------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def rank_1_dies_before_the_wait(group, way):
    die()


def rank_1_dies_during_the_wait(group, way):
    time.sleep(0.5)
    die()


def rank_1_never_joins(group, way):
    time.sleep(TIMEOUT.total_seconds() + 3)


def rank_1_destroys_its_group(group, way):
    time.sleep(0.2)
    dist.destroy_process_group()


GLOO = {
    "gloo_rank_dies_before_the_wait": rank_1_dies_before_the_wait,
    "gloo_rank_dies_during_the_wait": rank_1_dies_during_the_wait,
    "gloo_rank_never_joins": rank_1_never_joins,
    "gloo_rank_destroys_its_group": rank_1_destroys_its_group,
}


def gloo(rank: int, file: str, way: str, fault: Callable) -> str:
    store = dist.FileStore(file, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=HANG))
    group = dist.group.WORLD.group_name
    fn = warm(group, way) if rank == 0 else program(group, "eager")
    if rank == 1:
        fn(ONES)
    dist.barrier()
    # Compiling may take longer than the waits may.
    dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(TIMEOUT)
    return ended(lambda: fn(ONES)) if rank == 0 else fault(group, way)


LAZY = [
    work_fails,
    never_finishes,
    aborted_in_a_wait,
    interrupted_in_a_wait,
    group_destroyed_with_a_wait_pending,
    exception_between_issue_and_wait,
    waited_in_another_thread,
    two_threads_wait_for_one_tensor,
    freed_in_flight,
    no_memory_for_the_functional_wait,
]
FAULTS = {fault.__name__: fault for fault in LAZY} | GLOO


def forked(run: Callable[[], str]) -> tuple[int, int]:
    """The process that runs it, and the pipe from which its answer is read."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(read)
        answer = "nothing"
        try:
            answer = run() or "nothing"
        except BaseException as e:
            answer = f"the test itself failed: {type(e).__name__}: {e}"
        finally:
            os.write(write, answer.encode())
            # Without what Python and the group do at exit, which could hang.
            os._exit(0)
    os.close(write)
    return pid, read


def observed(name: str, way: str) -> str:
    if name in GLOO:
        file = f"{tempfile.mkdtemp()}/store"
        runs = [forked(lambda rank=rank: gloo(rank, file, way, GLOO[name])) for rank in (0, 1)]
    else:
        runs = [forked(lambda: FAULTS[name](way))]
    pids = [pid for pid, _ in runs]
    killer = threading.Timer(HANG, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids])
    killer.start()
    with os.fdopen(runs[0][1]) as pipe:
        answer = pipe.read() or "hung, or crashed"
    for pid, read in runs[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.close(read)
    for pid in pids:
        os.waitpid(pid, 0)
    killer.cancel()
    return answer


def main(names: list[str]) -> dict[str, dict[str, str]]:
    return {name: {way: observed(name, way) for way in WAYS} for name in names or FAULTS}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=1))
