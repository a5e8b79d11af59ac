"""Draws random programs that are correct: they read no tensor that is in flight.

A program is drawn from *genes*, a list of steps, each a list of numbers. A step takes its
numbers modulo what there is to choose from, so every list of steps is a correct program, and
a failing one is shrunk by leaving steps out. The result is Python source, to be read, kept as
a regression test, and compiled.

A program also knows its *kinds*: what its reads depend on. They are for counting; a program may be
wrong on stock torch for a reason that is none of them, such as a write to what a second wait returned.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol


Step = list[int]
Genes = list[Step]
# Enough for the step that takes the most numbers.
NUMBERS = 10
STEPS = (4, 11)
FULL = (4, 4)
GROUP_SIZE = 2

VIEWS: list[tuple[str, Callable[[tuple[int, ...]], tuple[int, ...] | None]]] = [
    ("{}.t()", lambda s: s[::-1] if len(s) == 2 else None),
    ("{}[1:3]", lambda s: (2, *s[1:]) if s[0] > 2 else None),
    ("{}[:, :2]", lambda s: (s[0], 2) if len(s) == 2 and s[1] > 2 else None),
    ("{}.unsqueeze(0)", lambda s: (1, *s) if len(s) == 2 else None),
    ("{}[0]", lambda s: s[1:] if len(s) > 1 else None),
    ("{}.diagonal()", lambda s: (min(s),) if len(s) == 2 else None),
    ("{}.view({})", lambda s: (s[0] * s[1],) if len(s) == 2 else None),
]
WAITS = [
    "c10d.wait_tensor({})",
    "c10d.wait_tensor({})",
    "torch.ops.c10d_functional.wait_tensor({})",
    "funcol.wait_tensor({})",
]


@dataclass(eq=False)
class Memory:
    """A storage: whether a collective is writing it, and what is known of its waits."""

    is_input: bool = False
    in_flight: bool = False
    # Collectives in flight that read it: it may not be written to.
    readers: set["Memory"] = field(default_factory=set)
    # Needed by backward as it is.
    saved: bool = False
    # How it was last waited for: the name of the waited tensor, and of the wait's result.
    waited: str | None = None
    coalesced: bool = False
    written: bool = False


@dataclass(eq=False)
class Value:
    name: str
    shape: tuple[int, ...]
    memory: Memory
    contiguous: bool = True
    # A view of its memory, and whether it was made before the last wait, or from its result.
    is_view: bool = False
    before_wait: bool = True
    from_result: bool = False
    grad: bool = True


@dataclass
class Program:
    """``source`` defines ``program(x0, x1, …)``, which returns a list of tensors.

    ``flying`` says of each input whether it is in flight when the program is called; ``grad``,
    whether inputs require grad and the sum of the outputs goes backward. ``dtype`` is the inputs'.
    """

    genes: Genes
    source: str
    flying: list[bool]
    grad: bool
    dtype: torch.dtype
    kinds: frozenset[str]

    def function(self, groups: dict[str, object]) -> Callable[..., list[torch.Tensor]]:
        namespace = {
            "torch": torch,
            "dist": dist,
            "funcol": funcol,
            "c10d": torch.ops._c10d_functional,
            "autograd_c10d": torch.ops._c10d_functional_autograd,
            **groups,
        }
        exec(compile(self.source, "<random program>", "exec"), namespace)
        return namespace["program"]

    def inputs(self, group: str) -> list[torch.Tensor]:
        """Fresh inputs; those that fly are outputs of an all-reduce that is pending."""
        xs = []
        for i, flying in enumerate(self.flying):
            x = (torch.arange(16).view(FULL) % 7 - 3 + i).to(self.dtype)
            if flying:
                torch.ops._c10d_functional.all_reduce_(x, "sum", group)
            xs.append(x.requires_grad_(self.grad))
        return xs


def genes(seed: int) -> Genes:
    """The genes of program ``seed``."""
    rng = random.Random(seed)
    steps = rng.randint(*STEPS)
    return [[rng.randrange(1 << 16) for _ in range(NUMBERS)] for _ in range(1 + steps)]


class _Drawing:
    def __init__(self, genes: Genes, grad: bool) -> None:
        self.numbers: list[int] = []
        self.values: list[Value] = []
        self.lines: list[str] = []
        self.kinds: set[str] = set()
        self.grad = grad
        self.count = 0
        self.flying: list[bool] = []
        head = list(genes[0])
        self.numbers = head
        # Integers show that the poison is no matter of NaN. They have no gradient.
        self.integer = not grad and self.chance(6)
        for i in range(1 + self.chance(2)):
            memory = Memory(is_input=True, in_flight=self.chance(3))
            self.flying.append(memory.in_flight)
            self.values.append(Value(f"x{i}", FULL, memory))
        for step in genes[1:]:
            self.numbers = list(step)
            self.draw(self.steps())()
        self.numbers = list(genes[-1])[::-1]
        self.finish()

    # --- choices ----------------------------------------------------------------------

    def number(self, below: int) -> int:
        return self.numbers.pop() % below if self.numbers else 0

    def draw(self, options: list):
        return options[self.number(len(options))]

    def pick(self, values: list[Value]) -> Value:
        """One of the values; half the time a late one, so that programs become deep."""
        return self.draw(values[-3:] if self.chance(2) else values)

    def chance(self, one_in: int) -> bool:
        return self.number(one_in) == one_in - 1

    def steps(self) -> list[Callable[[], None]]:
        steps = [self.collective] * 5 + [self.wait] * 4 + [self.view] * 3
        steps += [self.pointwise] * 4 + [self.in_place] * 2 + [self.branch]
        if not self.grad:
            steps += [self.collective_in_place, self.collective_out, self.control_flow]
        return steps

    # --- values -----------------------------------------------------------------------

    def emit(self, line: str) -> None:
        self.lines.append(line)

    def new(self, shape, memory: Memory | None = None, **kwargs) -> Value:
        value = Value(f"t{self.count}", shape, memory or Memory(), **kwargs)
        self.count += 1
        self.values.append(value)
        return value

    def readable(self, test: Callable[[Value], bool] = lambda v: True) -> list[Value]:
        return [v for v in self.values if not v.memory.in_flight and test(v)]

    def read(self, value: Value, by: str) -> str:
        """Its name, and what the read depends on goes to the kinds."""
        memory = value.memory
        if memory.waited is not None and not value.from_result:
            self.kinds.add("read past an ignored wait")
            if memory.is_input:
                self.kinds.add("in-flight input")
            if value.is_view:
                self.kinds.add("view before the wait" if value.before_wait else "view after the wait")
            if memory.waited != value.name:
                self.kinds.add("wait on another alias")
            if memory.coalesced:
                self.kinds.add("coalesced")
            if by in ("mul", "square", "sin") and self.grad:
                self.kinds.add("saved for backward")
            if by in ("collective", "in-place", "cond", "output"):
                self.kinds.add(f"{by} past an ignored wait")
        elif memory.waited is not None:
            self.kinds.add("wait used")
        if by in ("mul", "square", "sin"):
            memory.saved = True
        return value.name

    def finish_flight(self, memory: Memory, waited: str) -> None:
        memory.in_flight = False
        memory.waited = waited
        for v in self.values:
            v.memory.readers.discard(memory)
            if v.memory is memory:
                v.before_wait = True

    # --- steps ------------------------------------------------------------------------

    def pointwise(self) -> None:
        values = self.readable()
        if not values:
            return
        a = self.pick(values)
        b = self.draw(self.readable(lambda v: v.shape == a.shape))
        kind = self.draw([0, 1, 2, 2, 2, 3, 4] if self.grad else [0, 1, 2, 3, 4])
        if kind == 0:
            code = f"{self.read(a, 'add')} + {self.read(b, 'add')}"
        elif kind == 1:
            code = f"{self.read(a, 'scale')} * {'2' if self.integer else '0.5'}"
        elif kind == 2 and not self.integer:
            code = f"{self.read(a, 'sin')}.sin() * {self.read(b, 'mul')}"
        elif kind == 4 and not self.integer and a.shape == FULL:
            # Overlap scheduling hides collectives behind this only.
            code = f"({self.read(a, 'mul')} @ {self.read(b, 'mul')}) * 0.125"
        else:
            code = f"{self.read(a, 'add')} - 1"
        t = self.new(a.shape, contiguous=a.contiguous and b.contiguous)
        self.emit(f"{t.name} = {code}")

    def view(self) -> None:
        base = self.pick(self.values)
        code, shape_of = self.draw(VIEWS)
        shape = shape_of(base.shape)
        if shape is None or ("view" in code and not base.contiguous) or 0 in shape:
            return
        contiguous = base.contiguous and code in ("{}[1:3]", "{}.unsqueeze(0)", "{}[0]", "{}.view({})")
        t = self.new(
            shape,
            base.memory,
            contiguous=contiguous,
            is_view=True,
            before_wait=base.memory.in_flight,
            from_result=base.from_result,
        )
        self.emit(f"{t.name} = {code.format(base.name, shape[0])}")

    def in_place(self) -> None:
        values = self.readable(lambda v: not v.memory.readers)
        if self.grad:
            # Autograd refuses both.
            values = [v for v in values if not v.memory.is_input and not v.memory.saved]
        if not values:
            return
        a = self.pick(values)
        others = self.readable(lambda v: v.shape == a.shape and v.memory is not a.memory)
        if others and self.chance(2):
            b = self.read(self.draw(others), "in-place")
            self.emit(f"{self.read(a, 'in-place')}.{self.draw(['add_', 'copy_'])}({b})")
        else:
            self.emit(f"{self.read(a, 'in-place')}.{self.draw(['add_(1)', 'mul_(2)'])}")
        if a.memory.waited is not None:
            self.kinds.add("write past a wait")
        a.memory.written = True

    def branch(self) -> None:
        """On a constant, with a different step in each arm; only one is ever run."""
        values = self.readable()
        if not values:
            return
        a = self.pick(values)
        name = self.read(a, "add")
        t = self.new(a.shape)
        taken, other = self.draw([("+", "-"), ("-", "+")])
        self.emit(f"if {a.name}.ndim == {len(a.shape)}:")
        self.emit(f"    {t.name} = {name} {taken} 3")
        self.emit("else:")
        self.emit(f"    {t.name} = {name} {other} 3")

    def source(self) -> Value | None:
        values = self.readable(lambda v: len(v.shape) >= 1 and v.shape[0] % GROUP_SIZE == 0)
        return self.pick(values) if values else None

    def contiguous(self, value: Value, by: str = "collective") -> str:
        name = self.read(value, by)
        return name if value.contiguous else f"{name}.contiguous()"

    def group(self) -> str:
        return self.draw(["A", "B"])

    def reduction(self) -> str:
        return "sum" if self.grad else self.draw(["sum", "sum", "max"] if self.integer else ["sum", "avg", "max"])

    def fly(self, shape, inputs: list[Value], coalesced: bool = False) -> Value:
        t = self.new(shape, Memory(in_flight=True, coalesced=coalesced))
        for source in inputs:
            # Who had to make it contiguous gave the collective a copy.
            if source.contiguous:
                source.memory.readers.add(t.memory)
        return t

    def collective(self) -> None:
        a = self.source()
        if a is None:
            return
        rows, rest = a.shape[0], a.shape[1:]
        gathered, scattered = (rows * GROUP_SIZE, *rest), (rows // GROUP_SIZE, *rest)
        group, op = self.group(), self.reduction()
        # Upstream: where no gradient is asked for, Inductor takes a collective with one for any op,
        # and uses its input's buffer again before the wait.
        kind = self.draw(
            ["all_reduce"] * 3 + ["gather", "scatter", "exchange", "coalesced", "functional"]
            + ["autograd" if self.grad else "broadcast"]
        )
        # No tensor grows without bounds.
        if kind == "gather" and rows > 4:
            kind = "scatter"
        if kind == "coalesced":
            return self.coalesced(a, group, op)
        name = self.contiguous(a)
        if kind == "all_reduce":
            t = self.fly(a.shape, [a])
            self.emit(f'{t.name} = c10d.all_reduce({name}, "{op}", {group})')
        elif kind == "gather":
            t = self.fly(gathered, [a])
            self.emit(f"{t.name} = c10d.all_gather_into_tensor({name}, {GROUP_SIZE}, {group})")
        elif kind == "scatter":
            t = self.fly(scattered, [a])
            self.emit(f'{t.name} = c10d.reduce_scatter_tensor({name}, "{op}", {GROUP_SIZE}, {group})')
        elif kind == "exchange":
            t = self.fly(a.shape, [a])
            half = [rows // GROUP_SIZE] * GROUP_SIZE
            self.emit(f"{t.name} = c10d.all_to_all_single({name}, {half}, {half}, {group})")
        elif kind == "broadcast":
            t = self.fly(a.shape, [a])
            self.emit(f"{t.name} = c10d.broadcast({name}, 1, {group})")
        elif kind == "autograd" and rows <= 4:
            t = self.fly(gathered, [a])
            self.emit(f"{t.name} = autograd_c10d.all_gather_into_tensor({name}, {GROUP_SIZE}, {group})")
        else:
            # The Python API waits by itself: at once when compiled, else at the first read.
            t = self.new(a.shape)
            self.emit(f'{t.name} = funcol.all_reduce({name}, "{op}", {group}) + 0')
        t.grad = op == "sum"

    def coalesced(self, a: Value, group: str, op: str) -> None:
        b = self.draw(self.readable(lambda v: v.shape == a.shape))
        names = f"[{self.contiguous(a)}, {self.contiguous(b)}]"
        rows, rest = a.shape[0], a.shape[1:]
        kind = self.number(3)
        if kind == 1 and rows > 4:
            kind = 2
        shape = [a.shape, (rows * GROUP_SIZE, *rest), (rows // GROUP_SIZE, *rest)][kind]
        code = [
            f'c10d.all_reduce_coalesced({names}, "{op}", {group})',
            f"c10d.all_gather_into_tensor_coalesced({names}, {GROUP_SIZE}, {group})",
            f'c10d.reduce_scatter_tensor_coalesced({names}, "{op}", {GROUP_SIZE}, {group})',
        ][kind]
        s, t = (self.fly(shape, [a, b], coalesced=True) for _ in range(2))
        self.emit(f"{s.name}, {t.name} = {code}")

    def collective_in_place(self) -> None:
        values = self.readable(lambda v: v.contiguous and not v.memory.readers)
        if not values:
            return
        a = self.pick(values)
        name, group = self.read(a, "in-place"), self.group()
        # The functional ops that write in place cannot be traced, these can. Each waits by itself.
        self.emit(f"dist.all_reduce({name}, group={group}_group)")
        a.memory.written = True

    def collective_out(self) -> None:
        a = self.source()
        if a is None or a.shape[0] > 4:
            return
        name, group = self.contiguous(a), self.group()
        t = self.new((a.shape[0] * GROUP_SIZE, *a.shape[1:]))
        self.emit(f"{t.name} = {a.name}.new_zeros({list(t.shape)})")
        self.emit(f"dist.all_gather_into_tensor({t.name}, {name}, group={group}_group)")

    def wait(self) -> None:
        values = [v for v in self.values if v.memory.in_flight]
        # A second wait does no harm.
        if not values or self.chance(8):
            values = self.values
        self.wait_for(self.draw(values))

    def wait_for(self, value: Value) -> None:
        code = self.draw(WAITS).format(value.name)
        memory = value.memory
        flying = memory.in_flight
        if value.is_view:
            self.kinds.add("wait on a view")
        if flying:
            self.finish_flight(memory, value.name)
        if self.chance(2):
            t = self.new(
                value.shape,
                memory,
                contiguous=value.contiguous,
                is_view=value.is_view,
                from_result=flying or value.from_result,
            )
            self.emit(f"{t.name} = {code}")
        else:
            self.emit(code)

    def control_flow(self) -> None:
        """A `cond` with a collective of its own, or one that waits for its operand."""
        values = [v for v in self.values if v.contiguous and v.shape == FULL]
        if not values or not self.chance(2):
            return
        a = self.pick(values)
        n, group = self.count, self.group()
        predicate = f"{self.readable()[0].name}.sum() > 0" if self.readable() else "torch.tensor(True)"
        if self.readable():
            self.read(self.readable()[0], "cond")
        body = ["    def yes(a):"]
        if a.memory.in_flight:
            name = a.name
            body += ["        c10d.wait_tensor(a)", "        return a + 1"]
            other = ["        return c10d.wait_tensor(a) - 1"]
            self.kinds.add("wait in a cond")
        else:
            name = self.read(a, "cond")
            body += [
                f'        y = c10d.all_reduce(a * 2, "sum", {group})',
                "        c10d.wait_tensor(y)",
                "        return y + 1",
            ]
            other = ["        return a - 1"]
            self.kinds.add("collective in a cond")
        # A function, so that names in the arms are theirs alone.
        self.emit(f"def cond{n}(p, a):")
        for line in [*body, "    def no(a):", *other, "    return torch.cond(p, yes, no, (a,))"]:
            self.emit(line)
        t = self.new(FULL)
        self.emit(f"{t.name} = cond{n}({predicate}, {name})")
        # What was waited for in a body is not known to be outside: it is waited for again.

    def finish(self) -> None:
        """Wait for what is left, and return some of what there is."""
        for memory in dict.fromkeys(v.memory for v in self.values):
            if memory.in_flight:
                self.wait_for(self.draw([v for v in self.values if v.memory is memory]))
        # What is not returned may be fused away, or its memory used again.
        values = self.values
        outputs = dict.fromkeys([values[-1], *(self.draw(values) for _ in range(2 + self.chance(2)))])
        self.emit(f"return [{', '.join(self.read(v, 'output') for v in outputs)}]")


def draw(genes: Genes, grad: bool = False) -> Program:
    """The program that these genes stand for."""
    drawing = _Drawing(genes, grad)
    head = ", ".join(f"x{i}" for i in range(len(drawing.flying)))
    body = "".join(f"    {line}\n" for line in drawing.lines)
    return Program(
        genes,
        f"def program({head}):\n{body}",
        drawing.flying,
        grad,
        torch.int64 if drawing.integer else torch.float64,
        frozenset(drawing.kinds),
    )


def program(seed: int) -> Program:
    """Program number ``seed``; every third trains."""
    return draw(genes(seed), grad=seed % 3 == 2)


def shrink(genes: Genes, fails: Callable[[Genes], bool]) -> Genes:
    """Fewer steps and smaller numbers that still fail."""
    again = True
    while again:
        again = False
        for i in range(len(genes) - 1, 0, -1):
            fewer = genes[:i] + genes[i + 1 :]
            if fails(fewer):
                genes, again = fewer, True
    for i, step in enumerate(genes):
        for j in range(len(step)):
            smaller = genes[:i] + [step[:j] + [0] + step[j + 1 :]] + genes[i + 1 :]
            if step[j] and fails(smaller):
                genes, step = smaller, smaller[i]
    return genes


def make_groups() -> dict[str, object]:
    """Two groups of the default one's ranks: their names are A and B, as in the programs."""
    groups: dict[str, object] = {}
    for name, ranks in {"A": [0, 1], "B": [0, 2]}.items():
        group = dist.new_group(ranks, backend="simulated")
        groups |= {name: group.group_name, f"{name}_group": group}
    return groups
