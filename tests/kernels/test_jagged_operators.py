"""The public functions: checks at the door, gradients, operator contracts, offsets beyond 2³¹."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from freescale.kernels import combine_ranges, dispatch_ranges, ops, permute_jagged, reference, transpose_keyed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = torch.tensor([1, 3, 0, 2])
ROWS = torch.tensor([3, 1, 1, 0, 3])  # repeats, and row 2 left out
STARTS = torch.tensor([4, 0, 6, 8])  # no overlap, gaps
LONGEST = torch.tensor([2**63 - 1, 2**63 - 1, 8, 0])  # modulo 2^64 they add up to 6
OVERLAPPING = torch.tensor([2, 0, 1, 3])


def doubles(*shape: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(device).requires_grad_()


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "permute": lambda v: permute_jagged(v, LENGTHS.to(v.device), ROWS.to(v.device))[0],
    "dispatch": lambda v: dispatch_ranges(v, OVERLAPPING.to(v.device), LENGTHS.to(v.device), 6),
    "combine": lambda v: combine_ranges(v, STARTS.to(v.device), LENGTHS.to(v.device), 10),
    "sum": lambda v: ops.sum_ranges([v], OVERLAPPING.to(v.device), LENGTHS.to(v.device), 7)[0],
    "transpose": lambda v: transpose_keyed(v, LENGTHS.to(v.device).view(2, 2))[0],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_and_their_gradients_are_right(name: str, device: str) -> None:
    values = doubles(6, 2, device=device)
    assert torch.autograd.gradcheck(FUNCTIONS[name], values)
    assert torch.autograd.gradgradcheck(FUNCTIONS[name], values)


def test_only_floating_tensors_that_ask_for_it_get_gradients() -> None:
    weights, ids, frozen = doubles(6, 3), torch.arange(6), torch.randn(6)
    (moved, moved_ids, moved_frozen), lengths = permute_jagged([weights, ids, frozen], LENGTHS, ROWS)
    assert moved.requires_grad
    assert not moved_ids.requires_grad
    assert not lengths.requires_grad
    assert torch.equal(moved_ids, reference.permute_jagged(ids, LENGTHS, ROWS)[0])
    (moved.sum() + moved_frozen.sum()).backward()
    expected = torch.tensor([1.0, 2, 2, 2, 2, 2], dtype=torch.float64)
    assert weights.grad is not None
    assert torch.equal(weights.grad, expected[:, None].expand(6, 3))


@pytest.mark.parametrize("device", DEVICES)
def test_operators_keep_their_contracts(device: str) -> None:
    lengths, rows = LENGTHS.to(device), ROWS.to(device)
    values, ids = doubles(6, 2, device=device), torch.arange(6, device=device)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("permute_jagged", ([values, ids], lengths, rows, None)),
        ("permute_jagged", ([values], lengths.int(), rows, 11)),
        ("dispatch_ranges", ([values], OVERLAPPING.to(device), lengths, 6)),
        ("dispatch_ranges", ([ids], OVERLAPPING.to(device), lengths, None)),
        ("combine_ranges", ([values, ids], STARTS.to(device), lengths, 10)),
        ("sum_ranges", ([values], OVERLAPPING.to(device), lengths, 7)),
        ("transpose_keyed", ([values], lengths.view(2, 2))),
    ]
    for name, arguments in calls:
        packet = getattr(torch.ops.freescale, name)
        torch.library.opcheck(packet.default, arguments)
        plain = ([tensor.detach() for tensor in arguments[0]], *arguments[1:])
        torch.library.opcheck(packet.plain, plain)


def test_modes_see_the_operators_that_calls_otherwise_pass_by() -> None:
    seen: list[str] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with Noting():  # type: ignore[no-untyped-call]  # its base class has no types
        permute_jagged(torch.arange(6), LENGTHS, ROWS)
    assert seen[-1] == "freescale::permute_jagged.plain"
    with FakeTensorMode(allow_non_fake_inputs=True):
        moved = dispatch_ranges(torch.empty(6, 3), OVERLAPPING, LENGTHS, 6)
    assert isinstance(moved, FakeTensor)
    assert moved.shape == (6, 3)
    traced = make_fx(lambda v: combine_ranges(v, STARTS, LENGTHS, 10))(torch.arange(6))
    assert "freescale.combine_ranges.plain" in traced.code


def test_subclasses_of_tensors_see_the_operators() -> None:
    class Marked(Tensor):
        pass

    marked = torch.arange(6).as_subclass(Marked)
    assert type(dispatch_ranges(marked, OVERLAPPING, LENGTHS, 6)) is Marked


def test_a_compiled_function_takes_sizes_that_it_does_not_know() -> None:
    compiled = torch.compile(lambda v: permute_jagged(v, LENGTHS, ROWS)[0] * 2, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.arange(6)), FUNCTIONS["permute"](torch.arange(6)) * 2)


@pytest.mark.parametrize("device", DEVICES)
def test_conjugates_and_negatives_move_as_what_they_stand_for(device: str) -> None:
    """PyTorch keeps both as a bit beside memory that says otherwise."""
    lengths, order = torch.full((8,), 5, device=device), torch.arange(8, device=device).flip(0)
    numbers = torch.randn(40, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).to(device)
    for values in (numbers.conj(), torch._neg_view(numbers.real.contiguous())):
        assert torch.equal(permute_jagged(values, lengths, order, 40)[0], values.view(8, 5).flip(0).reshape(-1))


def test_one_tensor_gives_a_tensor_and_a_sequence_gives_a_list() -> None:
    alone = dispatch_ranges(torch.arange(9), OVERLAPPING, LENGTHS)
    together = dispatch_ranges((torch.arange(9), torch.arange(18).view(9, 2)), OVERLAPPING, LENGTHS)
    assert isinstance(together, list)
    assert torch.equal(alone, together[0])
    assert together[1].shape == (6, 2)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: permute_jagged(torch.arange(6), LENGTHS.float(), ROWS), TypeError, "lengths must be int64 or int32"),
        (lambda: permute_jagged(torch.arange(6), LENGTHS, ROWS[None]), ValueError, "rows must have 1 dimension"),
        (lambda: permute_jagged(torch.arange(6), LENGTHS, ROWS + 1), ValueError, "from 0 to 3, got 1 to 4"),
        (lambda: permute_jagged(torch.arange(5), LENGTHS, ROWS), ValueError, "add up to the rows of values"),
        (lambda: permute_jagged(torch.arange(6), LONGEST, ROWS), ValueError, r"\(6\), got 18446744073709551622"),
        (lambda: dispatch_ranges(torch.arange(6), LONGEST, LONGEST), ValueError, r"18446744073709551614\) at 0"),
        (lambda: permute_jagged(torch.arange(6), LENGTHS, ROWS, 9), ValueError, r"sum of the lengths \(11\), got 9"),
        (lambda: permute_jagged([], LENGTHS, ROWS), ValueError, "at least one tensor"),
        (lambda: permute_jagged([torch.ones(6), torch.ones(5)], LENGTHS, ROWS), ValueError, "the same number of them"),
        (lambda: permute_jagged(torch.tensor(1), LENGTHS, ROWS), ValueError, "must have rows"),
        (lambda: dispatch_ranges(torch.arange(5), STARTS, LENGTHS), ValueError, r"values \(5\), got \[6, 6\)"),
        (lambda: dispatch_ranges(torch.arange(5), STARTS - 5, LENGTHS), ValueError, r"got \[-1, 0\) at 0"),
        (lambda: dispatch_ranges(torch.arange(9), STARTS - 1, LENGTHS + 1), ValueError, r"got \[-1, 3\) at 1"),
        (lambda: combine_ranges(torch.arange(6), OVERLAPPING - 1, LENGTHS, 9), ValueError, r"got \[-1, 2\) at 1"),
        (lambda: dispatch_ranges(torch.arange(5), STARTS[1:], LENGTHS), ValueError, "one shape, got 3 and 4"),
        (lambda: dispatch_ranges(torch.arange(9), STARTS, LENGTHS - 1), ValueError, "must not be negative, got -1"),
        (lambda: combine_ranges(torch.arange(6), OVERLAPPING, LENGTHS, 9), ValueError, "must not overlap, got"),
        (lambda: combine_ranges(torch.arange(6), STARTS, LENGTHS, 9), ValueError, r"size \(9\), got \[8, 10\)"),
        (lambda: combine_ranges(torch.arange(6), STARTS, LENGTHS, -1), ValueError, "size must not be negative"),
        (lambda: transpose_keyed(torch.arange(6), LENGTHS), ValueError, "lengths must have 2 dimension"),
        (lambda: transpose_keyed(torch.arange(7), LENGTHS.view(2, 2)), ValueError, "lengths must add up"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


MANY, SHORT = torch.arange(100_000), torch.arange(3)
EACH, FROM = torch.full((100,), 1000), torch.arange(0, 100_000, 1000)


@pytest.mark.parametrize("overload", ["default", "plain"])
@pytest.mark.parametrize(
    ("name", "arguments", "error", "words"),
    [
        ("permute_jagged", ([MANY, SHORT], EACH, torch.arange(100), None), ValueError, r"\[\[100000\], \[3\]\]"),
        ("permute_jagged", ([MANY], EACH, torch.arange(100).double(), None), TypeError, "rows must be int64 or int32"),
        ("dispatch_ranges", ([MANY, SHORT], FROM, EACH, None), ValueError, r"\[\[100000\], \[3\]\]"),
        ("dispatch_ranges", ([], FROM, EACH, None), ValueError, "at least one tensor"),
        ("combine_ranges", ([MANY, SHORT], FROM, EACH, 100_000), ValueError, r"\[\[100000\], \[3\]\]"),
        ("combine_ranges", ([MANY], FROM[:1], EACH, 100_000), ValueError, "one shape, got 1 and 100"),
        ("sum_ranges", ([MANY, SHORT], FROM, EACH, 100_000), ValueError, r"\[\[100000\], \[3\]\]"),
        ("sum_ranges", ([MANY], FROM[:1], EACH, 100_000), ValueError, "one shape, got 1 and 100"),
        ("transpose_keyed", ([MANY, SHORT], EACH.view(10, 10)), ValueError, r"\[\[100000\], \[3\]\]"),
    ],
)  # fmt: skip
def test_registered_operators_check_shapes_too(
    name: str, arguments: tuple[Any, ...], error: type[Exception], words: str, overload: str
) -> None:
    """A shorter tensor beside another was read beyond its end."""
    with pytest.raises(error, match=words):
        getattr(getattr(torch.ops.freescale, name), overload)(*arguments)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own, at the first jvp
def test_forward_mode_gradients_are_refused_where_there_are_any() -> None:
    values, tangent = torch.arange(6.0), torch.ones(6)

    def permuted(given: Tensor) -> Tensor:
        return permute_jagged(given, LENGTHS, ROWS)[0]

    for times in (1, 5000):  # few rows go by operations of torch, which would know the tangent
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(values.repeat(times), tangent.repeat(times))
            lengths = torch.tensor([len(dual)])
            with pytest.raises(NotImplementedError, match="permute_jagged has no forward-mode gradient"):
                permute_jagged(dual, lengths, torch.tensor([0]))
            with pytest.raises(NotImplementedError, match="dispatch_ranges has no forward-mode gradient"):
                torch.ops.freescale.dispatch_ranges([dual], torch.tensor([0]), lengths, None)
            assert torch.equal(permuted(values), reference.permute_jagged(values, LENGTHS, ROWS)[0])
    with pytest.raises(NotImplementedError, match="permute_jagged has no forward-mode gradient"):
        torch.func.jvp(permuted, (values,), (tangent,))
    assert torch.func.jvp(lambda scale: scale * permuted(values), (tangent[0],), (tangent[0],))[1].shape == (11,)


def test_sources_beyond_two_to_the_31_rows_are_addressed(path: Any) -> None:
    size = 2**31 + 4096
    values = torch.empty(size, dtype=torch.uint8, device=path.device)  # on the host, untouched pages take no memory
    values[5:9] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    values[-3:] = torch.tensor([7, 8, 9], dtype=torch.uint8)
    (moved,) = path.run("dispatch_ranges", [values], torch.tensor([size - 3, 5, size - 2]), torch.tensor([3, 4, 2]), 9)
    assert moved.tolist() == [7, 8, 9, 1, 2, 3, 4, 8, 9]
    lengths, rows = torch.tensor([5, 4, size - 12, 3]), torch.tensor([3, 1])
    (moved,), _ = path.run("permute_jagged", [values], lengths, rows, 7)
    assert moved.tolist() == [7, 8, 9, 1, 2, 3, 4]


@pytest.mark.gpu
def test_results_beyond_two_to_the_31_rows_are_addressed() -> None:
    half, tail = 2**31 - 5, 4099
    values = (torch.arange(half + tail, device="cuda") % 251).to(torch.uint8)
    lengths, rows = torch.tensor([half, tail], device="cuda"), torch.tensor([0, 1, 0], device="cuda")
    total = 2 * half + tail
    moved, _ = permute_jagged(values, lengths, rows, total)
    assert torch.equal(moved[:half], values[:half])
    assert torch.equal(moved[half : half + tail], values[half:])
    assert torch.equal(moved[half + tail :], values[:half])
    starts = torch.tensor([half + tail, half, 0], device="cuda")
    back = combine_ranges(moved, starts, torch.tensor([half, tail, half], device="cuda"), total)
    assert torch.equal(back[half + tail :], values[:half])
    assert torch.equal(back[half : half + tail], values[half:])


@pytest.mark.gpu
def test_nothing_synchronises_when_sizes_are_given() -> None:
    values = [torch.randn(6, 2, device="cuda"), torch.arange(6, device="cuda")]
    lengths, rows, starts = (tensor.cuda() for tensor in (LENGTHS, ROWS, STARTS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        permute_jagged(values, lengths, rows, 11)
        dispatch_ranges(values, starts - starts, lengths, 6)
        combine_ranges(values, starts, lengths, 10)
        transpose_keyed(values, lengths.view(2, 2))
        ops.sum_ranges(values[:1], starts, lengths, 10)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_ranges_that_leave_the_buffer_on_a_gpu_harm_nothing() -> None:
    values = torch.ones(6, device="cuda")
    wild = torch.tensor([2**40, -7, 4], device="cuda")
    combined = combine_ranges(values, wild, torch.tensor([2, 2, 2], device="cuda"), 8)
    assert combined.tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
