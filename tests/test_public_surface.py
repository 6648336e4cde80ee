"""The names that other packages import, literally: they are there, and take what they are given."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import published_names
import pytest
import torch
from devices import DEVICE

_names = str.split
LIST = published_names.LIST

# What others import beside the names of the list, at the paths that they write
OTHERS = _names("""
    ops:infer_device ops.backends.registry:IMPL_REGISTRY ops.fused_linear_cross_entropy:MAX_FUSED_SIZE
    ops.utils:amp_custom_bwd ops.utils:amp_custom_fwd chunked_loss:grpo_loss transformers:functional
    transformers:_apply_liger_kernel transformers:_apply_liger_kernel_to_instance
    transformers:AutoLigerKernelForCausalLM transformers:LigerFusedNeighborhoodAttention
    transformers:LigerRMSNormForGemma transformers:LigerRMSNormForGemma2 transformers:LigerRMSNormForGemma3
    transformers:LigerRMSNormForGemma4 transformers:LigerRMSNormForGlm4 transformers:LigerRMSNormForOlmo2
    transformers:LigerRMSNormForQwen3Next transformers.rms_norm:LigerRMSNormFunction
    transformers:apply_liger_kernel_to_qwen3_5_text transformers:apply_liger_kernel_to_qwen3_5_moe_text
    transformers.model:loss_utils transformers.model.qwen2:lce_forward_deprecated
    transformers.monkey_patch:_apply_liger_kernel transformers.monkey_patch:_apply_liger_kernel_to_instance
    transformers.monkey_patch:_patch_layer_norm_module transformers.monkey_patch:_patch_rms_norm_module
    transformers.monkey_patch:_patch_swiglu_module transformers.trainer_integration:_apply_liger_kernel
    transformers.fsdp:_FSDPForwardRedirection transformers.trainer:_FSDPForwardRedirection
    transformers.trainer.orpo_trainer:_FSDPForwardRedirection
""")
DATA = "torch_to_triton_dtype", "IMPL_REGISTRY", "MAX_FUSED_SIZE", "MODEL_TYPE_TO_APPLY_LIGER_FN"


def found(path: str):
    """What ``path``, "module:name", is here."""
    module, name = path.split(":")
    scope: dict = {}
    exec(f"from liger_kernel{'.' * bool(module)}{module} import {name}", scope)  # as users write it
    return scope[name]


@pytest.mark.parametrize("path", OTHERS)
def test_it_is_there(path):
    assert path.endswith(DATA) or inspect.getdoc(found(path))


def test_every_family_is_patched_by_either_path():
    pytest.importorskip("transformers")
    names = [name for module, name, _ in PUBLISHED if name.startswith("apply_liger_kernel_to_")]
    both = "transformers", "transformers.monkey_patch"
    assert len(names) > 40 and all(found(f"{module}:{name}") for module in both for name in names if "mega" not in name)


# -- parameters ----------------------------------------------------------------------------


def published() -> list[tuple[str, str, ast.arguments | None]]:
    """Module, name and parameters, None where there are none, of published_names.txt."""
    rows, module = [], ""
    for line in LIST.read_text().splitlines()[1:]:
        if line[0] == " ":
            name, _, rest = line.strip().partition("(")
            rows.append((module, name, ast.parse(f"def f({rest}: pass").body[0].args))
        else:
            module, *names = line.split()
            module = module.rstrip(".:")
            rows += [(module, name, None) for name in names]
    return rows


PUBLISHED = published()
IGNORED = "in_place"  # has no effect, whatever it says
# Where ours is another one on purpose
APPLY = "transformers.monkey_patch:apply_liger_kernel_to_"
DIFFERS = {
    f"{APPLY}granite": "the fused head serves its scaled logits, too, and is the default",
    **{f"{APPLY}{m}": "a kernel serves its experts, too, and is the default" for m in ("gpt_oss", "deepseek_v4")},
    "chunked_loss.kto_loss:LigerFusedLinearKTOFunction.apply": "without a reference, use_ref_model=True is an error; "
    "one that is given is used",
    "transformers.swiglu:LigerPhi3SwiGLUMLP.forward": "the argument is called as in transformers",
    # flags that other models take are listed, and those that none takes are refused
    **{f"{APPLY}{m}": "names its flags" for m in ("llava", "nemotron", "internvl", "smolvlm")},
}


def parameters_of(it) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(it).parameters.values() if p.name not in ("self", "cls", "ctx")]


@pytest.mark.parametrize("module, name, asked", [pytest.param(*row, id=f"{row[0]}:{row[1]}") for row in PUBLISHED])
def test_it_takes_what_is_published(module, name, asked):
    """The same parameters, order and defaults; there may be more behind them."""
    owner, _, method = name.partition(".")
    if owner == "LigerORPOTrainer":
        pytest.importorskip("trl", reason="trl is not installed")
    # a Function's ``apply`` takes its arguments by position there
    it, by_position = found(f"{module}:{owner}"), method == "apply"
    assert inspect.getdoc(it) or module not in ("functional", "ops", "transformers", "transformers.functional")
    if asked is None or f"{module}:{name}" in DIFFERS:
        return
    of_torch = method == "apply" and next(c for c in it.__mro__ if "apply" in vars(c)).__module__.startswith("torch.")
    # it is forward that says what it takes
    if of_torch or (method == "apply" and parameters_of(it.apply)[0].kind is inspect.Parameter.VAR_POSITIONAL):
        it = it.forward
    elif method:
        it = getattr(it, method)
    # its own model's forward, which may name them in another order
    if module.startswith("transformers.model.") and "forward" in name:
        inspect.signature(it).bind(None, **dict.fromkeys(a.arg for a in (*asked.args, *asked.kwonlyargs)))
        return
    ours = parameters_of(it)
    by_name = {p.name: p for p in ours}
    kinds = {p.kind for p in ours}
    positional = [*asked.posonlyargs, *asked.args]
    defaults = [None] * (len(positional) - len(asked.defaults)) + asked.defaults
    assert len(ours) >= len(positional)
    for want, default, p in zip(positional, defaults, ours):
        assert p.kind is not p.KEYWORD_ONLY and (by_position or p.name == want.arg)
        same_default(p, default)
    for want, default in zip(asked.kwonlyargs, asked.kw_defaults):
        assert want.arg in by_name
        same_default(by_name[want.arg], default)
    assert not asked.vararg or inspect.Parameter.VAR_POSITIONAL in kinds
    assert not asked.kwarg or inspect.Parameter.VAR_KEYWORD in kinds


def same_default(p: inspect.Parameter, default: ast.expr | None) -> None:
    if default is not None and p.name != IGNORED:
        # a field's factory, a constant of theirs
        if isinstance(default, ast.Call) or (isinstance(default, ast.Name) and default.id.isupper()):
            assert p.default is not p.empty
        elif isinstance(default, ast.Name):  # of torch: a dtype
            assert str(p.default).rpartition(".")[2] == default.id
        else:
            assert p.default == ast.literal_eval(default), (p.name, p.default)


@pytest.mark.network
def test_the_list_is_that_of_the_newest_wheel(tmp_path):
    """``python tests/published_names.py`` writes the list anew."""
    try:
        wheel = published_names.newest(tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no index here: {error.stderr.strip().splitlines()[-1:]}")
    assert published_names.text(*published_names.read(wheel)) == LIST.read_text()


# -- forwards to assign to a class ----------------------------------------------------------

SOME = ("llama", "gemma3", "qwen2_vl", "muse_glimmer", "mllama")  # the others are `families`


def forwards() -> list:
    from liger_kernel._legacy import forwards

    rows = [(module.rpartition(".")[2], *row) for module, of in forwards().items() for row in of.items()]
    marks = lambda module: [] if module in SOME else pytest.mark.families
    return [pytest.param(*row, id="-".join(row[:2]), marks=marks(row[0])) for row in rows]


@pytest.mark.parametrize("module, name, cls", forwards())
def test_forwards_to_assign_or_bind(module, name, cls):
    """Bound to a stock model, with labels they learn what it learns, without making logits."""
    transformers = pytest.importorskip("transformers")
    from hf_models import assert_same_learning, batch_of, make, served_by_kernels_or_references, step

    if not hasattr(transformers, cls):
        pytest.skip(f"transformers {transformers.__version__} has no {cls}")
    model = make(getattr(transformers, cls).config_class.model_type, head=cls)
    batch = batch_of(model)
    with served_by_kernels_or_references():
        want = step(model, batch)[1]
        model.forward = types.MethodType(found(f"transformers.model.{module}:{name}"), model)
        out, learned = step(model, batch)
    assert out.logits is None and type(out).__name__.startswith("Liger")
    assert_same_learning(learned, want, 1e-5)


def test_the_loss_of_a_trainable_head():
    from hf_models import make
    from liger_kernel.transformers.model.llama import lce_maybe_trainable_lm_head, unpack_cross_entropy_result

    model, x, ids = make("llama"), torch.randn(2, 5, 64, device=DEVICE), torch.randint(0, 30, (2, 5), device=DEVICE)
    want = torch.nn.functional.cross_entropy(model.lm_head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    found = lce_maybe_trainable_lm_head(model, x, 64, ids, None, return_predicted_tokens=True)
    loss, z_loss, accuracy, predicted = unpack_cross_entropy_result(found)
    torch.testing.assert_close(loss, want)
    assert z_loss is accuracy is None and torch.equal(predicted.view(2, 5)[:, :-1], model.lm_head(x).argmax(-1)[:, :-1])
    assert unpack_cross_entropy_result((loss, 1)) == (loss, 1, None, None)
    assert unpack_cross_entropy_result(loss) == (loss, None, None, None)


def test_every_form_of_import_finds_a_module():
    """Unless the module above has an operator of its name."""
    from liger_kernel._legacy import aliases

    operators = [path for path in aliases() if path.startswith("liger_kernel.ops.") and path.count(".") == 2]
    operators.append("liger_kernel.backends.dispatch")
    for path in aliases():
        above, _, name = path.rpartition(".")
        for form in (f"import {path} as it", f"from {above} import {name} as it"):
            scope: dict = {}
            exec(form, scope)
            assert scope["it"] is sys.modules[path] or path in operators, form


REEXPORTS = _names("""
    transformers.functional:LigerRMSNormFunction transformers.jsd:LigerJSDFunction transformers.swiglu:LigerSiLUMulFunction
    transformers.cross_entropy:CrossEntropyOutput transformers.monkey_patch:LigerRMSNorm transformers.model.mistral:LigerForCausalLMLoss
    transformers.model.gemma3:LigerGemma3CausalLMOutputWithPast
""")  # noqa: E501


@pytest.mark.parametrize("path", REEXPORTS)
def test_what_published_modules_import_is_there_too(path):
    import liger_kernel.transformers.jsd

    assert found(path).__name__ == path.split(":")[1]
    for name in ("LigerNoFunction", "_linear", "os"):
        assert not hasattr(liger_kernel.transformers.jsd, name)


# -- what some of them do ------------------------------------------------------------------


def test_losses_as_functions():
    from liger_kernel.ops import LigerCrossEntropyFunction, LigerFusedLinearCrossEntropyFunction

    torch.manual_seed(0)
    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    target = torch.tensor([0, 3, -100, 10, 7, 7])
    logits = x @ w.t()
    want = torch.nn.functional.cross_entropy(logits, target)
    loss, z_loss, accuracy, predicted = LigerFusedLinearCrossEntropyFunction.apply(x, w, target)
    torch.testing.assert_close(loss, want)
    assert z_loss is accuracy is predicted is None
    asked = LigerCrossEntropyFunction.apply(logits, target, None, -100, 1e-4, 0.0, "mean", None, True, True, True)
    valid = target != -100
    torch.testing.assert_close(asked[1], 1e-4 * logits.logsumexp(-1)[valid].square().mean())
    assert asked[2] == (logits.argmax(-1) == target)[valid].float().mean()
    assert torch.equal(asked[3], logits.argmax(-1).where(valid, -1))


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_launchers_without_autograd():
    """What they return, and the chains that LinkedIn's Functions make of them."""
    from liger_kernel.compat import host as launchers
    from liger_kernel.ops import dyt, mhc_coeffs, mhc_post_res, mhc_pre, mlp, tvd

    seeded = lambda seed: torch.Generator(DEVICE).manual_seed(seed)
    new = lambda *shape: torch.randn(*shape, device=DEVICE, generator=seeded(sum(shape))).requires_grad_()
    grad, close = torch.autograd.grad, torch.testing.assert_close
    x, a, g, b, dy = new(2, 5, 8), new(1), new(8), new(8) + 1, new(2, 5, 8).detach()
    for weights in ((a, g, b), (a, g)):
        y, padding = dyt(x, *weights), (None,) * (3 - len(weights))
        close(launchers.liger_dyt_fwd(x, *weights, *padding), y)
        close(launchers.liger_dyt_bwd(dy, x, *weights, *padding), (*grad(y, (x, *weights), dy), *padding))

    q, p, labels = new(4, 6), new(4, 6).detach().softmax(-1), torch.tensor([0, -100, 1, 2], device=DEVICE)
    for reduction in ("none", "sum", "mean", "batchmean"):
        kl = torch.nn.functional.kl_div(q, p, reduction=reduction)
        close(launchers.kldiv_forward_triton(q, p.log(), True, reduction, 0.0), kl)
        loss, dq = launchers.tv_distance_forward_triton(q.softmax(-1), p, labels, reduction, -100, True)
        s = q.softmax(-1).detach().requires_grad_()
        want = tvd(s, p, labels, reduction=reduction)
        close((loss, launchers.tvd_backward_triton(torch.tensor(2.0), dq)), (want.detach(), grad(2 * want.sum(), s)[0]))
    into = torch.empty_like(p)
    close(launchers.kldiv_backward_triton(p, torch.tensor(3.0), into, False), -3 * p)
    close(into, -p)

    x, phi, b, alphas = new(7, 2, 16), new(32, 8), new(8), [new(1) * s for s in (1, 2, 3)]
    of = dict(tmax=3, sinkhorn_eps=1e-6, pre_eps=0.1, post_mult=2.0)
    want, into = mhc_coeffs(x, phi, b, *alphas, rms_eps=1e-5, **of), torch.empty(7, device=DEVICE)
    mix, invr = launchers.mhc_mm_norm_fwd(x.flatten(1), phi, 1e-5, out_invr=into)
    *found, steps = launchers.mhc_split_sinkhorn_fwd(mix, b, *alphas, **of, return_hist=True)
    close(tuple(found), want)
    assert invr is into and steps.shape == (7, 3, 2, 2) and torch.equal(steps[:, -1], found[2])
    d_res = launchers.mhc_sinkhorn_bwd(mix, b, alphas[2], torch.ones_like(found[2]).tril(), tmax=3, sinkhorn_eps=1e-6)
    dx, dphi, db = grad(want[2].tril().sum(), (x, phi, b), retain_graph=True)
    d_mix = torch.nn.functional.pad(d_res.flatten(1) * alphas[2], (4, 0))
    close(d_res.sum(0).flatten(), db[4:])
    close(launchers.mhc_mm_norm_bwd(x.flatten(1), phi, mix, invr, d_mix), (dx.flatten(1), dphi), rtol=1e-4, atol=1e-5)
    pre, post, res, f = *(t.detach().requires_grad_() for t in want), new(7, 16)
    close(launchers.mhc_pre_fwd(x, pre), mhc_pre(x, pre))
    close(launchers.mhc_pre_bwd(x, pre, f), grad(mhc_pre(x, pre), (x, pre), f))
    y = mhc_post_res(x, f, post, res)
    close(launchers.mhc_post_res_fwd(x, f, post, res), y)
    close(launchers.mhc_post_res_bwd(x, f, post, res, x), grad(y, (x, f, post, res), x))

    x, gate, up, down, dy = new(2, 3, 8), new(12, 8), new(12, 8), new(8, 12), new(2, 3, 8).detach()
    want = mlp(x, gate, up, down, act="silu", gate_multiplier=0.5, down_multiplier=2.0)
    agu, config = launchers.gemm_swiglu(x, gate, up, 0.5)
    close(agu[..., :12] @ down.t() * 2, want)
    close(launchers.gemm_swiglu(x, gate, up, 0.5, False), (agu[..., :12], None))
    launchers.swiglu_backward_dGU(dy, down.detach(), agu, config, 0.5, 2.0)
    close(launchers.swiglu_backward_dI(gate, up, agu), grad(want, x, dy)[0])
    assert [launchers.get_bucket_m(M) for M in (0, 255, 256, 4095, 9999)] == [0, 7, 10, 39, 40]
    assert [launchers.get_num_warps(block) for block in (64, 2048, 8192)] == [4, 8, 16]


def test_private_names_that_others_import():
    from liger_kernel.transformers.grpo_loss import _reduce_grpo_loss
    from liger_kernel.transformers.jsd import LigerJSDFunction

    from liger_kernel.ops import LigerJSDFunction as ours
    from liger_kernel.utils import _infer_amd_arch

    assert LigerJSDFunction is ours and callable(_infer_amd_arch)
    losses, mask = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    expected = dict.fromkeys(("grpo", "sapo"), (1.5 + 8) / 2) | dict(dr_grpo=11 / 6, luspo=11 / 2)
    expected |= dict.fromkeys(("bnpo", "dapo", "cispo", "vespo"), 11 / 3)
    for loss_type, loss in expected.items():
        torch.testing.assert_close(_reduce_grpo_loss(losses, mask, loss_type, None), torch.tensor(loss))
    torch.testing.assert_close(_reduce_grpo_loss(losses, None, "dr_grpo", 7), losses.sum() / 14)
    torch.testing.assert_close(_reduce_grpo_loss(losses, mask, "dapo", None, 5), torch.tensor(11 / 5))


def test_devices():
    from liger_kernel.ops.utils import amp_custom_bwd, amp_custom_fwd, device_context

    from liger_kernel import utils

    expected = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    assert (utils.infer_device(), utils.infer_comm_backend()) == expected
    assert utils.is_npu_available() is False
    if torch.cuda.is_available():
        assert utils.infer_device_arch()[:2] in ("sm", "gf") and utils.get_total_gpu_memory() > 0
    else:
        assert utils.infer_device_arch() == "cpu"
        with pytest.raises(RuntimeError, match="must be a GPU"):
            utils.get_total_gpu_memory()
    assert utils.transformers_version_dispatch("1.0", min, max, (1, 2), (3, 4)) == 4
    assert utils.transformers_version_dispatch("999.0", min, max, (1, 2), (3, 4)) == 1

    class Double(torch.autograd.Function):
        @staticmethod
        @amp_custom_fwd
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @amp_custom_bwd
        def backward(ctx, dy):
            return dy * 2

    x = torch.ones(3, device=utils.infer_device(), requires_grad=True)
    with device_context(x.device):
        Double.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_another_implementation_is_refused_audibly():
    code = "import warnings; warnings.simplefilter('error', UserWarning); import liger_kernel.ops"
    how = dict(env=os.environ | {"LIGER_KERNEL_IMPL": "cutile"}, capture_output=True, text=True, check=False)
    done = subprocess.run([sys.executable, "-c", code], **how)
    assert "LIGER_KERNEL_IMPL=cutile" in done.stderr and done.returncode


def test_cache_of_many_processes(tmp_path, monkeypatch):
    triton_cache = pytest.importorskip("triton.runtime.cache", reason="Triton is not installed")
    from liger_kernel.triton import apply_liger_triton_cache_manager
    from liger_kernel.triton.monkey_patch import LigerTritonFileCacheManager

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "")
    apply_liger_triton_cache_manager()
    manager = triton_cache.get_cache_manager("ABCD")
    assert type(manager).__name__ == LigerTritonFileCacheManager.__name__
    for data, read in ((b"\x00binary", Path.read_bytes), ("text", Path.read_text)):
        path = manager.put(data, "kernel", binary=isinstance(data, bytes))
        assert read(Path(path)) == data
        assert [p.name for p in Path(path).parent.iterdir() if "lock" not in p.name] == ["kernel"]
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        manager.put(b"more", "other")
    assert not [p for p in Path(path).parent.iterdir() if p.name.startswith("tmp")]


def test_calls_of_what_fsdp_has_sharded():
    """What is called sees the gathered parameters; the module's ``forward`` is back at once."""
    from liger_kernel.transformers.trainer.orpo_trainer import _FSDPForwardRedirection

    class Wrapper(torch.nn.Module):  # what FSDP1 does around a call
        def __init__(self, module):
            super().__init__()
            self.module, self.gathered = module, False

        def forward(self, *args, **kwargs):
            self.gathered = True
            try:
                return self.module(*args, **kwargs)
            finally:
                self.gathered = False

    wrapper = Wrapper(torch.nn.Linear(2, 2))

    def loss(head, x, scale):
        assert wrapper.gathered and wrapper.module is head
        return head(x).sum() * scale

    x = torch.ones(1, 2)
    assert _FSDPForwardRedirection()(wrapper, loss, wrapper.module, x, scale=2) == wrapper.module(x).sum() * 2
    with pytest.raises(ZeroDivisionError):
        _FSDPForwardRedirection()(wrapper, lambda *_: 1 / 0, x)
    assert "forward" not in wrapper.module.__dict__
    own = wrapper.module.forward = types.MethodType(lambda self, x: x, wrapper.module)
    assert _FSDPForwardRedirection()(wrapper, lambda x: x + 1, x).equal(x + 1) and wrapper.module.forward is own


def test_modules_of_muse_glimmer():
    """What transformers has computes the same with the same weights."""
    modeling = pytest.importorskip("transformers.models.muse_glimmer.modeling_muse_glimmer")
    import liger_kernel.transformers as ours_of

    config = types.SimpleNamespace(hidden_size=16, intermediate_size=24, hidden_activation="silu")
    norm, mlp = ours_of.LigerRMSNormForMuseGlimmer, ours_of.LigerSwiGLUMLPForMuseGlimmer
    pairs = [
        (norm(16), modeling.MuseGlimmerRMSNorm(16)),
        (norm(with_scale=False), modeling.MuseGlimmerRMSNorm(with_scale=False)),
        (ours_of.LigerRMSNormForMuseGlimmerTextCentered(16), modeling.MuseGlimmerTextCenteredRMSNorm(16)),
        (mlp(config), modeling.MuseGlimmerTextMLP(config)),
    ]
    torch.manual_seed(0)
    for ours, stock in pairs:
        for p in stock.parameters():
            torch.nn.init.normal_(p)
        assert not ours.load_state_dict(stock.state_dict()).missing_keys
        x = torch.randn(2, 3, 16, device=DEVICE)
        torch.testing.assert_close(ours.to(DEVICE)(x), stock.to(DEVICE)(x))
    with pytest.raises(ValueError, match="dim must be"):
        norm()
    config.hidden_activation = "gelu"
    with pytest.raises(ValueError, match="activation must be one of"):
        mlp(config)


def test_a_layer_norm_with_a_named_implementation():
    from liger_kernel.transformers.layer_norm import LigerLayerNorm

    from liger_kernel.backends import ImplNotAvailableError

    x, norm = torch.randn(3, 8, device=DEVICE), LigerLayerNorm(8, impl="torch").to(DEVICE)
    torch.testing.assert_close(norm(x), torch.nn.functional.layer_norm(x, (8,), eps=1e-6))
    assert norm.backend == "torch" and "impl='torch'" in repr(norm) and "impl" not in repr(LigerLayerNorm(8))
    norm.backend = "cutile"
    with pytest.raises(ImplNotAvailableError):
        norm(x)


def test_modules_print_their_settings():
    from liger_kernel import nn

    config = types.SimpleNamespace(hidden_size=4, intermediate_size=8, hidden_act="silu")
    assert "softcap=30.0" in repr(nn.LigerFusedLinearCrossEntropyLoss(softcap=30.0))
    assert "reduction='sum'" in repr(nn.LigerTVDLoss("sum")) and "act='silu'" in repr(nn.LigerSwiGLUMLP(config))


def test_weights_drawn_again():
    from liger_kernel.transformers import LigerMultiTokenAttention

    module = LigerMultiTokenAttention(2, 2, 3)
    before = module.weight.clone()
    torch.nn.init.ones_(module.bias)
    module.reset_parameters()
    assert not torch.equal(module.weight, before) and module.weight.abs().max() <= 18**-0.5 and not module.bias.any()


def test_chunks_of_losses_with_a_loop_of_their_own():
    from liger_kernel.chunked_loss import (
        LigerFusedLinearPPOBase as Rewarded,
        LigerFusedLinearPreferenceBase as Pairs,
        LigerFusedLinearUnpairedPreferenceBase as Unpaired,
    )

    torch.manual_seed(0)
    x, w, b, y = torch.randn(4, 5, 8), torch.randn(11, 8), torch.randn(11), torch.randint(0, 11, (4, 5))
    y[1, 2:] = y[2] = -100
    logits, counts = x @ w.t() + b, y != -100
    each = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(4, 5)
    chosen, rejected, of_chosen, of_rejected, nll = Pairs.chunk_forward(x, w, y, b)
    torch.testing.assert_close(torch.cat((chosen, rejected)), each.sum(1) / counts.sum(1).clamp(min=1))
    torch.testing.assert_close(torch.cat((of_chosen, of_rejected)), logits)
    torch.testing.assert_close(nll, -each[:2].sum())
    assert Pairs.chunk_forward(x, w, y, b, compute_nll_loss=False)[-1] == 0
    marks = torch.tensor([True, False, True, False])
    logps, *sums = Unpaired.chunk_forward(x, w, y, marks, b)
    torch.testing.assert_close(logps, each.sum(1))
    torch.testing.assert_close(sums, [of[which].sum() for of in (logps, logits) for which in (marks, ~marks)])
    ids = y.clamp(min=0)
    want = (logits / 0.7).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    torch.testing.assert_close(Rewarded.chunk_forward(x, w, ids, b, temperature=0.7), want)


def test_ropes_of_llama4_in_a_module():
    module = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    from liger_kernel.transformers import liger_llama4_text_rotary_pos_emb, liger_llama4_vision_rotary_pos_emb, restore
    from liger_kernel.transformers.llama4_rope import apply_liger_llama4_rope_full

    functions = lambda: (module.apply_rotary_emb, module.vision_apply_rotary_emb)
    stock = functions()
    apply_liger_llama4_rope_full(module)
    try:
        assert functions() == (liger_llama4_text_rotary_pos_emb, liger_llama4_vision_rotary_pos_emb)
    finally:
        restore("llama4")
    assert functions() == stock


def test_type_checkers_see_what_documents_import():
    """``typed_uses.py`` has every import of ours that documents and examples show."""
    root = Path(__file__).parents[1]
    named = lambda text: {
        (m, n)
        for m, names in re.findall(r"^ *from (liger_kernel[\w.]*) import (\([^)]*\)|[\w, ]+)", text, re.M)
        for n in re.findall(r"\w+", names)
    }
    pages = root / "README.md", *root.glob("docs/**/*.md"), *root.glob("examples/*.py")
    shown = {name for path in pages for name in named(path.read_text())}
    assert shown and not shown - named((root / "tests" / "typed_uses.py").read_text())
