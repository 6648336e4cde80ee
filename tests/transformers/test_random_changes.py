"""Random programs that change a model before and after it is patched: loss and gradients stay those
of the stock model that went through the same.

A hundred by default; ``LIGER_TEST_PROGRAMS=5000`` tries as many. A failure names its seed:
``LIGER_TEST_PROGRAMS=1 LIGER_TEST_SEED=seed`` runs that alone.
"""

import contextlib
import copy
import os
import pickle
import random
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from hf_models import DEVICE, served_by_kernels_or_references, step
from quick import words
from torch import nn
from transformers.models.llama import modeling_llama

import liger_kernel.transformers as liger

try:
    import peft
except ImportError:
    peft = None  # type: ignore[assignment]

PROGRAMS, FIRST = int(os.environ.get("LIGER_TEST_PROGRAMS", 100)), int(os.environ.get("LIGER_TEST_SEED", 0))
KINDS = "instance", "class"
IDS = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(1)).to(DEVICE)
BATCH = {"input_ids": IDS, "labels": IDS.masked_fill(torch.arange(7, device=DEVICE) < 2, -100)}


class Run:
    """A model on its way through a program, and what is given back when ``stack`` closes."""

    def __init__(self, kind: str, seed: int, stack: contextlib.ExitStack):
        self.kind, self.stack, self.hooks, self.patched = kind, stack, [], False
        torch.manual_seed(seed)
        sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1 + seed % 2)
        heads = dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=seed % 3 == 0)
        config = transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=64, pad_token_id=0)
        self.model: Any = transformers.LlamaForCausalLM(config).to(DEVICE)
        for p in self.model.parameters():
            if p.ndim == 1:
                nn.init.normal_(p, 1.0, 0.2)

    @property
    def base(self) -> Any:
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def pick(self, r: random.Random, *classes: str) -> Any:
        """A module of one of these classes, or of a class made of them."""
        found = [m for _, m in self.model.named_modules() if any(c.__name__ in classes for c in type(m).__mro__)]
        return r.choice(found)

    def swap(self, owner: Any, name: str, new: Any) -> None:
        """``owner.name = new`` until the program ends."""
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(owner, name, new)

    def step(self) -> dict[str, torch.Tensor]:
        out, found = step(self.model, BATCH)
        return found if self.model.training else found | {"logits": out.logits.detach()}


SCALED = 1.25
PARTS = "LlamaRMSNorm", "LlamaMLP", "LlamaAttention", "LlamaDecoderLayer", "LlamaModel"
ANY = (*PARTS, "Linear", "Embedding", "SiLUActivation", "LlamaForCausalLM")


def scaled(y: Any) -> Any:
    """What a module of any kind returns, its values changed."""
    if isinstance(y, torch.Tensor):
        return SCALED * y if y.is_floating_point() else y
    if isinstance(y, tuple):
        return (scaled(y[0]), *y[1:])
    if hasattr(y, "last_hidden_state"):
        y.last_hidden_state = scaled(y.last_hidden_state)
    return y


def rescaling(function: Callable) -> Callable:
    return lambda *args, **kwargs: scaled(function(*args, **kwargs))


def give_head(run: Run, weight: nn.Parameter) -> None:
    run.base.config.tie_word_embeddings = weight is run.base.model.embed_tokens.weight
    run.base.lm_head.weight = weight


def new_head(run: Run, r: random.Random) -> None:
    V, like = run.base.model.embed_tokens.weight.shape[0], run.base.model.norm.weight
    heads = [
        lambda: nn.Linear(32, V, bias=False),
        lambda: nn.Linear(32, V),
        lambda: nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, V)),
    ]
    run.base.lm_head = r.choice(heads)().to(like.device, like.dtype)


def new_part(run: Run, r: random.Random) -> None:
    model, like = run.base.model, run.base.model.norm.weight
    i = r.randrange(len(model.layers))
    makers: dict[str, Callable[[], nn.Module]] = {
        "layer": lambda: modeling_llama.LlamaDecoderLayer(model.config, i),
        "mlp": lambda: modeling_llama.LlamaMLP(model.config),
        "norm": lambda: r.choice((modeling_llama.LlamaRMSNorm, nn.LayerNorm, nn.Identity))(32),
        "act": lambda: r.choice((nn.GELU, nn.SiLU, nn.Tanh, nn.PReLU))(),
        "embedding": lambda: nn.Embedding(model.embed_tokens.weight.shape[0], 32),
    }
    what = r.choice(sorted(makers))
    new = makers[what]().to(like.device, like.dtype)
    if what == "layer":
        model.layers[i] = new
    elif what == "mlp":
        model.layers[i].mlp = new
    elif what == "norm":
        layer = model.layers[i]
        setattr(*r.choice(((model, "norm"), (layer, "input_layernorm"), (layer, "post_attention_layernorm"))), new)
    elif what == "act":
        model.layers[i].mlp.act_fn = new
    else:
        run.base.set_input_embeddings(new)


def another_class(run: Run, r: random.Random) -> None:
    module = run.pick(r, *PARTS)
    cls = type(module)
    by_super = lambda self, *args, **kwargs: scaled(super(new, self).forward(*args, **kwargs))
    forward = rescaling(cls.forward) if r.random() < 0.5 else by_super
    module.__class__ = new = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def class_forward(run: Run, r: random.Random) -> None:
    """Before a patch only: a patched module has a class of its own."""
    if run.patched:
        return
    cls = getattr(modeling_llama, r.choice((*PARTS, "LlamaForCausalLM")))
    forward = cls.forward
    rolled = lambda self, *args, **kwargs: forward(self, *args, **kwargs | {"labels": kwargs["labels"].roll(1, 0)})
    run.swap(cls, "forward", rolled if cls is modeling_llama.LlamaForCausalLM else rescaling(forward))


def function(run: Run, r: random.Random) -> None:
    name = r.choice(("apply_rotary_pos_emb", "repeat_kv", "eager_attention_forward"))
    of = getattr(modeling_llama, name)
    if name == "apply_rotary_pos_emb":
        run.swap(modeling_llama, name, lambda *args, **kwargs: tuple(SCALED * t for t in of(*args, **kwargs)))
    else:
        run.swap(modeling_llama, name, rescaling(of))


def hook(run: Run, r: random.Random) -> None:
    module, prepend = run.pick(r, *ANY), r.random() < 0.3
    after = lambda m, args, out: scaled(out)
    after_with = lambda m, args, kwargs, out: scaled(out)
    before = lambda m, args: tuple(scaled(a) for a in args)
    of_states = lambda kwargs: {k: scaled(v) if k == "hidden_states" else v for k, v in kwargs.items()}
    before_with = lambda m, args, kwargs: (tuple(scaled(a) for a in args), of_states(kwargs))
    first = lambda m, grads: tuple(None if g is None else SCALED * g for g in grads)
    back = lambda m, given, grads: tuple(None if g is None else SCALED * g for g in given)
    makers = [
        lambda: module.register_forward_hook(after, prepend=prepend),
        lambda: module.register_forward_hook(after_with, with_kwargs=True, prepend=prepend),
        lambda: module.register_forward_pre_hook(before, prepend=prepend),
        lambda: module.register_forward_pre_hook(before_with, with_kwargs=True, prepend=prepend),
        lambda: module.register_full_backward_hook(back),
        lambda: module.register_full_backward_pre_hook(first),
    ]
    run.hooks.append(r.choice(makers)())


def own_forward(run: Run, r: random.Random) -> None:
    module = run.pick(r, *PARTS, "Linear", "SiLUActivation")
    if r.random() < 0.5:
        module.forward = rescaling(module.forward)
    else:
        by_class = lambda self, *args, **kwargs: scaled(type(self).forward(self, *args, **kwargs))
        module.forward = types.MethodType(by_class, module)


def checkpointing(run: Run, r: random.Random) -> None:
    if r.random() < 0.3:
        run.base.gradient_checkpointing_disable()
    else:
        run.base.gradient_checkpointing_enable({"use_reentrant": False})


def learn(run: Run, r: random.Random) -> None:
    found = run.step()
    with torch.no_grad():
        for n, p in run.model.named_parameters():
            if n in found:
                p.sub_(0.1 * found[n])


def wrap(run: Run, r: random.Random) -> None:
    if peft is None or hasattr(run.model, "get_base_model"):
        return
    kinds = {}, {"use_dora": True}, {"modules_to_save": ["norm"]}, {"modules_to_save": ["lm_head"]}
    more: dict[str, Any] = r.choice(kinds)
    last = ["lm_head", "v_proj"] if "modules_to_save" not in more else ["up_proj"]
    targets = r.choice((["q_proj"], ["gate_proj", "down_proj"], last))
    config = peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM", **more)
    run.model = peft.get_peft_model(run.model, config)
    for name, p in run.model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, std=0.1)


def unwrap(run: Run, r: random.Random) -> None:
    if hasattr(run.model, "get_base_model"):
        run.model = run.model.merge_and_unload() if r.random() < 0.7 else run.model.unload()
        run.model.requires_grad_(True)


def patch(run: Run, r: random.Random) -> None:
    flags = {f: False for f in ("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy") if r.random() < 0.15}
    if flags.get("fused_linear_cross_entropy") is False and r.random() < 0.5:
        flags["cross_entropy"] = True
    flags["rematerialise"] = r.choice((True, False, "mlp"))
    run.patched = True
    if run.kind == "instance":
        liger._apply_liger_kernel_to_instance(model=run.model, **flags)
    elif run.kind == "class":
        liger._apply_liger_kernel("llama", **flags)


def restore(run: Run, r: random.Random) -> None:
    run.patched = False
    if run.kind != "stock":
        liger.restore(*([run.model] if run.kind == "instance" else []))


FUNCTIONS = new_head, new_part, another_class, class_forward, function, hook, own_forward, checkpointing, learn, wrap
CHANGES: dict[str, Callable[[Run, random.Random], Any]] = {
    "resize": lambda run, r: run.base.resize_token_embeddings(r.choice((53, 61, 64, 80)), mean_resizing=False),
    "tie": lambda run, r: give_head(run, run.base.model.embed_tokens.weight),
    "untie": lambda run, r: give_head(run, nn.Parameter(run.base.lm_head.weight.detach().clone())),
    "unhook": lambda run, r: run.hooks and run.hooks.pop(r.randrange(len(run.hooks))).remove(),
    "dtype": lambda run, r: run.model.to(r.choice((torch.float32, torch.float64, torch.bfloat16))),
    "load": lambda run, r: run.model.load_state_dict(
        {n: 1.1 * t if t.is_floating_point() else t for n, t in run.model.state_dict().items()}
    ),
    "mode": lambda run, r: run.model.train(r.random() < 0.5),
    "freeze": lambda run, r: run.pick(r, *ANY).requires_grad_(r.random() < 0.3),
    "attention": lambda run, r: run.base.set_attn_implementation(r.choice(("eager", "sdpa"))),
    "copied": lambda run, r: setattr(run, "model", r.choice((copy.copy, copy.deepcopy))(run.model)),
    # what has lambdas cannot be pickled, and stays
    "travelled": lambda run, r: setattr(run, "model", pickle.loads(pickle.dumps(run.model))),
} | {change.__name__: change for change in (*FUNCTIONS, unwrap, patch, restore)}
DRAWN = words("""
    resize tie untie new_head new_part another_class class_forward function hook hook hook unhook own_forward dtype
    checkpointing load learn mode freeze attention wrap unwrap copied travelled patch restore
""")

STOCK = [
    (c, "forward", c.forward) for c in vars(modeling_llama).values() if isinstance(c, type) and "forward" in vars(c)
]
STOCK += [(modeling_llama, name, f) for name, f in vars(modeling_llama).items() if isinstance(f, types.FunctionType)]


def as_new() -> None:
    """Classes and functions as transformers has them, whatever a program left."""
    liger.restore()
    for owner, name, function in STOCK:
        setattr(owner, name, function)


def program(seed: int) -> list[tuple[str, int]]:
    """Changes, each with the seed of its choices; one of them patches."""
    r = random.Random(seed)
    found = [(r.choice(DRAWN), r.randrange(2**31)) for _ in range(r.randint(1, 7))]
    found.insert(r.randint(0, len(found) // 2), ("patch", r.randrange(2**31)))
    return found


def result(kind: str, seed: int, steps: list[tuple[str, int]]) -> tuple[dict[str, torch.Tensor], Any]:
    """Learning at the end; for bf16, in fp64, too. ``at`` tells where an exception was raised."""
    with contextlib.ExitStack() as stack:
        stack.callback(as_new)
        run = Run(kind, seed, stack)
        for i, (change, s) in enumerate(steps):
            try:
                torch.manual_seed(s)
                CHANGES[change](run, random.Random(s))
            except Exception as error:
                error.at = i  # type: ignore[attr-defined]
                raise
        found = run.step()
        exact = None
        if kind == "stock" and run.base.dtype == torch.bfloat16:
            run.model.double()
            exact = run.step()
        return found, exact


def stock_result(seed: int, steps: list[tuple[str, int]]) -> tuple[list, dict[str, torch.Tensor] | None, Any]:
    """Of the longest part of a program that stock survives; None if not its last step."""
    while True:
        try:
            return steps, *result("stock", seed, steps)
        except Exception as error:
            if not hasattr(error, "at"):
                return steps, None, None
            if steps[error.at][0] == "patch":
                raise
            steps = steps[: error.at] + steps[error.at + 1 :]


def difference(
    found: dict[str, torch.Tensor], stock: dict[str, torch.Tensor], exact: dict[str, torch.Tensor] | None
) -> str | None:
    """What is wrong: names, more than fp32's rounding, or twice stock's error in bf16."""
    if found.keys() != stock.keys():
        return f"{sorted(found.keys() ^ stock.keys())} on one side only"
    gradients = sorted(n for n in stock if n not in ("loss", "logits"))
    if exact is None:
        floor = max((stock[n].abs().max().item() for n in gradients), default=0.0) / 100
        off = lambda n: (found[n] - stock[n]).abs().max().item() / max(stock[n].abs().max().item(), floor, 1e-30)
        wrong = {n: off(n) for n in stock if not off(n) <= 2e-5}
        return f"{wrong}" if wrong else None
    flat = lambda of: torch.cat([of[n].double().flatten() for n in gradients] or [torch.zeros(1)])
    ours, theirs = ((flat(each) - flat(exact)).norm().item() for each in (found, stock))
    loss = (found["loss"].double() - exact["loss"]).abs().item() / exact["loss"].abs().clamp(min=1).item()
    right = ours <= 2 * theirs + 1e-9 and loss <= 2**-6
    return None if right else f"errors {ours:.1e}, stock's {theirs:.1e}; of the loss {loss:.1e}"


def failures(seeds: range) -> Iterator[str]:
    for seed in seeds:
        steps, stock, exact = stock_result(seed, program(seed))
        names = f"seed {seed}: {' '.join(change for change, _ in steps)}"
        if stock is None or not all(torch.isfinite(g).all() for g in stock.values()):
            continue
        for kind in KINDS:
            try:
                wrong = difference(result(kind, seed, steps)[0], stock, exact)
            except Exception as error:
                wrong = f"raises {type(error).__name__}: {error} (at {getattr(error, 'at', 'the end')})"
            if wrong:
                yield f"{names}: {kind}: {wrong}"


@pytest.mark.parametrize("start", range(FIRST, FIRST + PROGRAMS, 25))
def test_random_changes(start):
    with served_by_kernels_or_references(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(failures(range(start, min(start + 25, FIRST + PROGRAMS))))
    assert not found, "\n".join(found)
