import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lightning_cp.attn.accumulators import NEVER
from lightning_cp.attn.blockwise.kernels import cpu, cudnn
from lightning_cp.attn.blockwise.kernels.base import BackwardInputs, Request, Scores
from lightning_cp.attn.blockwise.kernels.cudnn import CudnnKernel
from lightning_cp.attn.blockwise.kernels.dense import DenseKernel
from lightning_cp.attn.blockwise.kernels.flash import FlashKernel
from lightning_cp.attn.blockwise.kernels.reference import ReferenceKernel
from lightning_cp.attn.blockwise.kernels.select import select_kernel
from lightning_cp.attn.call import Bias
from lightning_cp.attn.plan import build_plan
from lightning_cp.comm.transport import LoneTransport
from lightning_cp.geometry.layout import build_layout
from lightning_cp.geometry.mask import Mask
from tests import doors
from tests.attn.cases import (
    ALL_KERNELS,
    KERNELS,
    MASKS,
    Case,
    attend_rank,
    build_call,
    forward_block,
    make_case,
    put_together,
)
from tests.oracle import assert_earned, attend_whole, errors, make_inputs

CPU = torch.device("cpu")


def run_alone(case):
    return put_together([attend_rank(LoneTransport(), case)], case)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tile_size", [4, 16])
def test_kernels_agree_with_the_oracle_however_they_are_tiled(kernel, mask, tile_size, monkeypatch):
    monkeypatch.setattr(type(KERNELS[kernel]), "tile_size", tile_size)
    case = make_case(mask, kernel=kernel)
    found = run_alone(case)
    assert max(errors(found, attend_whole(case.inputs, case.mask)).values()) < 1e-13


@pytest.mark.parametrize("dims", [(8, 8), (8, 3), (5, 17), (1, 1)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_head_dims_of_keys_and_values_may_differ(kernel, dims):
    inputs = make_inputs(batch=1, heads=(2, 1), length=21, dims=dims, sinks=False, seed=3)
    case = Case(MASKS["window"](1, 21), inputs, kernel=kernel, scale=-0.7)
    found = run_alone(case)
    exact = attend_whole(inputs, case.mask, scale=-0.7)
    assert max(errors(found, exact).values()) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_lower_precisions_earn_their_tolerance(kernel, mask, dtype, monkeypatch):
    monkeypatch.setattr(type(KERNELS[kernel]), "tile_size", 16)
    case = make_case(mask, kernel=kernel, length=61)
    case.inputs = case.inputs.to(dtype)
    found = run_alone(case)
    same = attend_whole(case.inputs, case.mask)
    exact = attend_whole(case.inputs.to(torch.float64), case.mask)
    assert_earned(found, same, exact, dtype)
    assert found["out"].dtype == dtype


@pytest.mark.parametrize("kernel", KERNELS)
def test_queries_that_see_nothing_return_zero_and_never(kernel):
    case = make_case("left padding", kernel=kernel)
    call = build_call(case, LoneTransport())
    block = call.plan.stages[0].block
    inputs = case.inputs
    out, lse = forward_block(
        KERNELS[kernel], inputs.q[:, :, block.q_slice], inputs.k, inputs.v, None, block, call.scores
    )
    empty = lse == NEVER
    first = block.q_slice.start
    for row in (0, 1):
        width = int(case.mask.padding[row].sum())
        assert empty[row].sum(-1).tolist() == [max(0, width - first)] * 4
    assert not out[empty].any()


class DenseOnCpu(DenseKernel):
    """Stands in for a kernel of the GPU: rectangles by the CPU's op, which is as ignorant."""

    name = "dense"
    max_head_dim = 256
    min_capability = 0
    tile_size = 16

    def rectangle_forward(self, q, k, v, *, causal, scale):
        self._check(q, k, v, causal=causal)
        return cpu.forward_op(q, k, v, 0.0, causal, scale=scale)

    def rectangle_backward(self, given, *, causal, scale):
        dout, q, k, v, out, lse = given
        self._check(q, k, v, out, dout, causal=causal)
        assert lse.is_contiguous()
        assert lse.dtype == torch.promote_types(q.dtype, torch.float32)
        return cpu.backward_op(dout, q, k, v, out, lse, 0.0, causal, scale=scale)

    def differentiable_rectangle(self, q, k, v, *, causal, scale):
        self._check(q, k, v, causal=causal)
        return cpu.forward_op(q, k, v, 0.0, causal, scale=scale)[0]

    def _check(self, *tensors, causal):
        assert len({x.shape[-1] for x in tensors}) == 1
        assert len({x.dtype for x in tensors}) == 1
        assert tensors[0].shape[2] == tensors[1].shape[2] or not causal
        for x in tensors:
            assert x.shape[-1] % 8 == 0
            assert x.data_ptr() % 16 == 0
            assert all(stride % 8 == 0 for stride in x.stride()[:-1])


@pytest.fixture
def dense(monkeypatch):
    monkeypatch.setitem(ALL_KERNELS, "dense", DenseOnCpu())
    return "dense"


@pytest.mark.parametrize("heads", ["mha", "gqa", "mqa"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_kernel_of_rectangles_knows_every_mask(dense, mask, heads):
    case = make_case(mask, kernel=dense, heads=heads, length=61)
    found = run_alone(case)
    assert max(errors(found, attend_whole(case.inputs, case.mask)).values()) < 1e-13


@pytest.mark.parametrize("mask", ["causal", "bidirectional", "documents"])
def test_a_kernel_of_rectangles_takes_a_bias_in_small_tiles(dense, mask):
    case = make_case(mask, kernel=dense, length=61)
    case.bias = torch.randn(2, 4, 61, 61, dtype=torch.float64)
    case.bias[0, :, 5:9] = NEVER
    found = run_alone(case)
    exact = attend_whole(case.inputs, case.mask, bias=case.bias)
    assert max(errors(found, exact).values()) < 1e-13
    block = build_call(case, LoneTransport()).plan.stages[0].block
    tiles = ALL_KERNELS[dense].tiles(block, Bias(case.bias))
    assert max(tile.query.size * tile.keys.size for tile in tiles) <= 16 * 16
    work = sum(
        block.bounds.sample(r).work(t.query, t.keys) for t in tiles for r in rows_of(t, block)
    )
    assert work == block.visible_pairs


def rows_of(tile, block):
    return range(*tile.batch.indices(block.bounds.num_samples))


def test_rows_that_start_anywhere_in_memory_are_copied_for_the_op(dense):
    case = make_case("causal", kernel=dense)
    for name in ("q", "k", "v"):
        x = getattr(case.inputs, name)
        larger = x.new_zeros(*x.shape[:-1], 11)
        larger[..., 1 : 1 + x.shape[-1]] = x
        setattr(case.inputs, name, larger[..., 1 : 1 + x.shape[-1]])
    call, inputs = build_call(case, LoneTransport()), case.inputs
    block = call.plan.stages[0].block
    out, _ = forward_block(call.kernel, inputs.q, inputs.k, inputs.v, None, block, call.scores)
    inputs.sinks = None
    assert errors({"out": out}, {"out": attend_whole(inputs, case.mask)["out"]})["out"] < 1e-13


def layouts_of(x):
    """Return a gradient in several layouts, one of which starts at no multiple of 16 bytes."""
    shifted = x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    return x, x.transpose(1, 2).contiguous().transpose(1, 2), x[:1].expand(x.shape), shifted


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
def test_the_op_gets_gradients_with_the_strides_of_the_queries(dense, mask, monkeypatch):
    case = make_case(mask, kernel=dense, heads="mha")
    inputs, call = case.inputs, build_call(case, LoneTransport())
    q = inputs.q.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    seen = []

    def spy(out, hook):
        return register(out, lambda x: seen.append(hook(x)) or seen[-1])

    register = torch.Tensor.register_hook
    monkeypatch.setattr(torch.Tensor, "register_hook", spy)
    for dout in layouts_of(torch.randn(q.shape, dtype=q.dtype)):
        out = call.run(q, inputs.k, inputs.k, None, None)
        assert out.grad_fn.name() != "_AttendBackward"
        (found,) = torch.autograd.grad(out, q, dout)
        given = dout if seen[-1] is None else seen[-1]
        assert given.stride() == q.stride()
        assert given.data_ptr() % 16 == 0
        assert torch.equal(given, dout)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            expected = call.run(q, inputs.k, inputs.k, None, None)
        assert torch.equal(found, torch.autograd.grad(expected, q, dout)[0])
    assert [x is None for x in seen] == [False, True, False, False]


def test_rows_that_start_anywhere_in_memory_are_differentiated_by_our_own_backward(dense):
    case = make_case("causal", kernel=dense, heads="mha")
    call, inputs = build_call(case, LoneTransport()), case.inputs
    k = inputs.k.new_empty(*inputs.k.shape[:-1], 11)[..., 1:9].copy_(inputs.k)
    out = call.run(inputs.q.requires_grad_(), k, inputs.k, None, None)
    assert out.grad_fn.name() == "_AttendBackward"


@pytest.mark.parametrize("native", [True, False])
def test_queries_that_share_memory_get_their_own_gradients(dense, native):
    """Written by q's strides, one gradient would overwrite another."""
    case = make_case("causal", kernel=dense, heads="mha", length=6)
    memory = torch.randn(384, dtype=torch.float64)
    q = memory.as_strided((2, 4, 6, 8), (8, 96, 8, 1)).requires_grad_()
    call, k = build_call(case, LoneTransport()), case.inputs.k
    v = k if native else case.inputs.v
    dout = torch.randn(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    found = call.run(q, k, v, None, None)
    for one, other in ((found, expected), *zip(*grads_of(q, dout, found, expected), strict=True)):
        assert (one - other).abs().max() < 1e-13


def grads_of(q, dout, *outs):
    return [torch.autograd.grad(out, q, dout) for out in outs]


def test_cudnn_is_differentiated_by_torch_once_both_passes_have_their_plans(monkeypatch):
    kernel, how = CudnnKernel(), {"causal": True, "scale": 0.5}
    q = torch.empty(2, 4, 256, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    assert kernel.differentiable_rectangle(q, q, q, **how) is None
    assert kernel.is_worth_a_plan(q, q, ("forward", True))
    assert kernel.differentiable_rectangle(q, q, q, **how) is None
    assert kernel.is_worth_a_plan(q, q, ("backward", True))
    out = kernel.differentiable_rectangle(q, q, q, **how)
    assert "CudnnAttention" in out.grad_fn.name()
    sliced = torch.empty(2, 256, 3, 4, 64, dtype=q.dtype, device="meta")[:, :, 0].transpose(1, 2)
    with monkeypatch.context() as patch:
        # It needs a GPU; its output would have other strides.
        patch.setattr(CudnnKernel, "run_op", None)
        assert kernel.differentiable_rectangle(sliced, q, q, **how) is None
    assert kernel.differentiable_rectangle(q[:, :, :200], q, q, **how) is None
    assert kernel.differentiable_rectangle(q, q, q, causal=False, scale=0.5) is None


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_ops_of_the_gpu_exist_and_take_what_they_are_given(name, causal):
    kernel, how = ALL_KERNELS[name], {"causal": causal, "scale": 0.5}
    q = torch.empty(2, 4, 256, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 2, 256, 64, dtype=torch.bfloat16, device="meta")
    out, lse = kernel.rectangle_forward(q, k, k, **how)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 4, 256), torch.float32)
    grads = kernel.rectangle_backward(BackwardInputs(out, q, k, k, out, lse), **how)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


def num_by_flash(kernel, queries, keys, *, kind="forward", dtype=torch.bfloat16, most=100):
    """Return how many calls of a shape FA2 computes before cuDNN does, a step being one call."""
    q = torch.empty(1, 32, queries, 128, device="meta", dtype=dtype)
    k = torch.empty(1, 8, keys, 128, device="meta", dtype=dtype)
    plans = [kernel.for_step().is_worth_a_plan(q, k, kind) for _ in range(most)]
    assert plans == sorted(plans)  # once planned it stays so
    return plans.count(False)


@pytest.mark.parametrize(
    ("queries", "keys", "num_calls"),
    [
        (256, 128, 0),
        (8192, 65536, 0),
        (300, 256, 100),
        (256, 300, 100),
        (2000, 16000, 68),
        (8191, 8192, 33),
        (8193, 8192, 0),
        (100_000, 1, 100),
        (1, 100_000, 100),
        (0, 128, 100),
    ],
)
def test_cudnn_takes_lengths_that_come_again_and_large_tiles(queries, keys, num_calls):
    assert num_by_flash(CudnnKernel(), queries, keys) == num_calls


@pytest.mark.parametrize(
    "other",
    [
        {"kind": "backward"},
        {"dtype": torch.float16},
        {"queries": 8190},
        {"keys": 8190},
    ],
    ids=str,
)
def test_cudnn_plans_every_shape_for_itself(other):
    kernel, shape = CudnnKernel(), {"queries": 8191, "keys": 8191}
    assert num_by_flash(kernel, **shape) == 33
    assert num_by_flash(kernel, **shape) == 0
    assert num_by_flash(kernel, **shape | other) == 33


def test_cudnn_plans_few_lengths_of_chunks_at_once():
    """Batches of ever new lengths, all multiples of 128: each plan would take 40 to 70 ms."""
    kernel, most = CudnnKernel(), CudnnKernel.max_trusted
    chunks = [128 * n for n in range(1, most + 1)]
    for _ in range(2):
        assert [num_by_flash(kernel, 256, n, most=1) for n in chunks] == [0] * most
    assert num_by_flash(kernel, 256, 128 * (most + 1), most=1) == 1
    assert num_by_flash(kernel, 1024, 7168, most=1000) == 293  # and is planned in the end
    assert num_by_flash(kernel, 8192, 8192) == 0  # the layers of one step pay for it
    assert num_by_flash(kernel, 256, 128) == 0


def test_cudnn_remembers_the_shapes_that_came_last(monkeypatch):
    monkeypatch.setattr(cudnn, "MAX_SHAPES", 3)  # of thousands
    kernel = CudnnKernel()
    assert num_by_flash(kernel, 8191, 8191) == 33
    assert num_by_flash(kernel, 8190, 8190) == 33
    for length in (101, 102):
        assert num_by_flash(kernel, length, length, most=1) == 1
    assert num_by_flash(kernel, 8190, 8190) == 0
    assert num_by_flash(kernel, 8191, 8191) == 33  # forgotten


@pytest.fixture
def by_flash(monkeypatch):
    """Return the list of what FA2 is asked for."""
    asked = []

    def spied(name, op):
        def spy(self, *args, **kwargs):
            asked.append(name)
            return op(self, *args, **kwargs)

        return spy

    for name in ("forward", "backward"):
        op = getattr(FlashKernel, f"rectangle_{name}")
        monkeypatch.setattr(FlashKernel, f"rectangle_{name}", spied(name, op))
    return asked


@pytest.mark.parametrize("causal", [True, False])
def test_a_step_computes_a_shape_by_one_kernel_to_its_end(causal, by_flash, monkeypatch):
    """A layer that is recomputed late finds what computed it first, also after other steps."""
    monkeypatch.setattr(CudnnKernel, "patience", 2**20)
    q = torch.empty(1, 4, 300, 64, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(1, 4, 300, device="meta")

    def run(kernel, *passes, causal=causal):
        by_flash.clear()
        for name in passes:
            if name == "forward":
                kernel.rectangle_forward(q, q, q, causal=causal, scale=1.0)
            else:
                given = BackwardInputs(q, q, q, q, q, lse)
                kernel.rectangle_backward(given, causal=causal, scale=1.0)
        return by_flash

    kernel = CudnnKernel()
    first = kernel.for_step()
    for _ in range(3):
        assert run(first, "forward") == ["forward"]
    second = kernel.for_step()
    assert run(second, "forward", "backward", "forward") == ["backward"]  # each has its own plan
    third = kernel.for_step()
    assert run(third, "forward", "backward") == []
    assert run(third, "forward", "backward", causal=not causal) == ["forward", "backward"]
    assert run(first, "forward", "backward") == ["forward", "backward"]


def on_cpu(dtype=torch.float32, *, device=CPU, softcap=None, scale=1.0, head_dim=64):
    return Request(device, dtype, Scores(scale, softcap), head_dim)


def on_gpu(dtype=torch.bfloat16, **kwargs):
    return on_cpu(dtype, device=torch.device("cuda:0"), **kwargs)


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there is a GPU: a Hopper, unless another capability is given."""

    def pretend(capability=(9, 0), cudnn=91900, flash=True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: flash)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        monkeypatch.setattr(torch.version, "hip", None)

    pretend()
    return pretend


@pytest.mark.parametrize(
    ("request_", "chosen"),
    [
        (on_cpu(), "cpu"),
        (on_cpu(torch.bfloat16), "cpu"),
        (on_cpu(softcap=30.0), "reference"),
        (on_cpu(device=torch.device("meta")), "reference"),
        (on_gpu(), "cudnn"),
        (on_gpu(torch.float16, head_dim=128), "cudnn"),
        (on_gpu(head_dim=129), "flash"),
        (on_gpu(head_dim=257), "reference"),
        (on_gpu(torch.float32), "reference"),
        (on_gpu(softcap=30.0), "reference"),
        (on_gpu(scale=-0.5), "reference"),
    ],
)
def test_auto_takes_the_first_kernel_that_can(request_, chosen, gpu):
    assert select_kernel("auto", request_).name == chosen


@pytest.mark.parametrize(
    ("name", "request_", "reason"),
    [
        ("cpu", on_cpu(softcap=30.0), r"it has no softcap \(got 30.0\)"),
        ("cpu", on_cpu(scale=0.0), r"its scale must be above 0 \(got 0.0\)"),
        ("cpu", on_gpu(), "it runs on CPUs, but the tensors are on cuda:0"),
        ("flash", on_cpu(), "it runs on GPUs, but the tensors are on cpu"),
        ("cudnn", on_cpu(), "it runs on GPUs, but the tensors are on cpu"),
        (
            "flash",
            on_gpu(torch.float32),
            "it computes bfloat16 and float16, but the tensors are torch.float32",
        ),
        ("cudnn", on_gpu(softcap=30.0), r"it has no softcap \(got 30.0\)"),
        ("flash", on_gpu(scale=-0.7), r"its scale must be above 0 \(got -0.7\)"),
        ("flash", on_gpu(head_dim=264), r"its largest head dim is 256 \(got 264\)"),
        ("cudnn", on_gpu(head_dim=192), r"its largest head dim is 128 \(got 192\)"),
    ],
)
def test_a_named_kernel_that_cannot_is_refused(name, request_, reason, gpu):
    with pytest.raises(
        ValueError,
        match=f"kernel='{name}' cannot compute this attention: {reason}. Use kernel='auto', or '",
    ):
        select_kernel(name, request_)


def test_a_gpu_or_a_build_that_cannot_is_refused(gpu, monkeypatch):
    gpu(capability=(8, 6))
    assert select_kernel("auto", on_gpu()).name == "flash"
    with pytest.raises(
        ValueError,
        match="it needs a GPU of compute capability 9.0 or newer, but cuda:0 has 8.6. "
        "Use kernel='auto', or 'flash' or 'reference'",
    ):
        select_kernel("cudnn", on_gpu())
    gpu(capability=(7, 5))
    with pytest.raises(ValueError, match="compute capability 8.0 or newer, but cuda:0 has 7.5"):
        select_kernel("flash", on_gpu())
    gpu(flash=False)
    with pytest.raises(ValueError, match="this build of torch has no flash attention"):
        select_kernel("flash", on_gpu())
    gpu(cudnn=None)
    with pytest.raises(ValueError, match="this build of torch has no cuDNN"):
        select_kernel("cudnn", on_gpu())
    gpu(cudnn=91002)
    with pytest.raises(ValueError, match="it needs cuDNN 9.15.1 or newer, but torch has 9.10.2"):
        select_kernel("cudnn", on_gpu())
    gpu()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(ValueError, match="not deterministic, but torch.use_deterministic_algor"):
        select_kernel("cudnn", on_gpu())
    assert select_kernel("auto", on_gpu()).name == "flash"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ValueError, match="it is for NVIDIA GPUs, but this torch is built for"):
        select_kernel("flash", on_gpu())


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="kernel='magic'.* is unknown. Use one of 'auto', 'cpu'"):
        doors.config(kernel="magic")


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_writes_out_no_large_tile(causal, monkeypatch):
    kernel = ReferenceKernel()
    monkeypatch.setattr(ReferenceKernel, "max_tile_size", 16)
    q, k, v = (torch.randn(1, 2, 70, 8, dtype=torch.float64) for _ in range(3))
    layout = build_layout("contiguous", seq_len=70, cp_size=1)
    bounds = Mask(causal=causal).bounds(70)
    plan = build_plan("gather", layout=layout, bounds=bounds, rank=0, num_kv_heads=2)
    block = plan.stages[0].block
    assert all(tile.query.size <= 16 and tile.keys.size <= 16 for tile in kernel.tiles(block, None))
    out, _ = forward_block(kernel, q, k, v, None, block, Scores(0.3))
    expected = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
    torch.testing.assert_close(out, expected)
