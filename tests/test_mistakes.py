"""What a user types wrong: one line on stderr that names the nearest right name, exit code 2,
and no traceback."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import torch
from quick import further

pytest.importorskip("transformers")

from liger_kernel.cli import COMMANDS, main
from liger_kernel.nearest import ALIASES, SYNONYMS, did_you_mean, no_such
from liger_kernel.train.config import TrainConfig

ROOT = Path(__file__).parents[1]
FILES = {
    "one.jsonl": '{"text": "hello"}\n',
    "chats.jsonl": '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}\n',
    "bad.parquet": "no parquet",
    "text.txt": "hello",
    "text.md": "hello",
    "qa.csv": "question,answer\nhi,hello\n",
    "roles.jsonl": '{"messages": [{"role": "user", "content": "hi"}, {"role": "Asistant", "content": "hello"}]}\n',
    "alpaca.jsonl": '{"instruct": "hi", "output": "hello"}\n',
    "config.yaml": "stepz: 3\n",
    "others.yaml": "num_train_epochs: 3\n",
    "types.yaml": "steps: many\n",
    "choice.json": '{"precision": "fp23"}',
    "list.json": "[1]",
    "noname.json": '{"steps": 3}',
    "wrongtype.json": '{"model_type": "lama"}',
    "wrongsize.json": '{"model_type": "llama", "hidden_size": "big"}',
    "operators.json": '{"meta": {}, "rows": [{"op": "glu", "variant": "ours"}]}',
    "steps.json": '{"meta": {}, "rows": [{"model": "tiny", "variant": "ours"}]}',
    "norows.json": '{"meta": {}, "rows": []}',
    "row.json": '{"meta": {}, "rows": [1]}',
    "job.yaml": "name: run\nimage: r.io/liger:1\nvolume: v\nimag: x\ntrain: {checkpoint_every: 5}\n",
    "kind.yaml": "name: run\nimage: r.io/liger:1\nvolume: v\nkind: jobsett\ntrain: {checkpoint_every: 5}\n",
    "trainjob.yaml": "name: run\nimage: r.io/liger:1\nvolume: v\ntrain: {checkpoint_evry: 5}\n",
    "notrain.yaml": "name: run\nimage: r.io/liger:1\nvolume: v\n",
    "goodjob.yaml": "name: run\nimage: r.io/liger:1\nvolume: v\ngpus: 1\ntrain: {checkpoint_every: 5}\n",
    "empty/.keep": "",
    "model/config.json": "{}",
    "adapters/adapter_config.json": '{"base_model_name_or_path": null}',
}
ON_CPU = "--data chats.jsonl --device cpu --hidden 32 --heads 2"
NO_HUB = "it is no folder here, and the Hugging Face hub cannot be reached"


def without_gpu(*row: str) -> list[tuple[str, ...]]:
    return [] if torch.cuda.is_available() else [row]


# The command line, and a pattern of the one line on stderr
TABLE = [
    ("trian", r"liger: no command 'trian'; did you mean train\?$"),
    ("--vresion", r"liger: no flag --vresion; did you mean --version\?"),
    # train: flags
    ("train --batchs 3", r"liger train: no flag --batchs; did you mean --batch\?"),
    ("train --seq 1", "length must be at least 2, got 1"),  # no abbreviation of --sequence-parallel-size
    *(
        (f"train {line}", said)
        for line, said in (
            # names of others with our values: what is wrong is the value
            ("--learning-rate fast", "--lr must be a number, got 'fast'"),
            ("--max_steps 5 --num_train_epochs 1", "--steps and --epochs exclude each other"),
            ("--report_to none", "report must be of tensorboard, wandb, mlflow"),
            ("--val_set_size 2000", r"eval_fraction must be in \[0, 1\), got 2000"),
            ("--dataset_name chat.jsonl", r"no such file: chat.jsonl; did you mean chats.jsonl\?"),
            # names of others that mean something else, or have other values
            ("--bf16", r"no flag --bf16; did you mean --precision bf16-mixed\?"),
            ("--push_to_hub", "no flag --push_to_hub; liger train --help lists the flags"),
            ("--dry-run True", "unexpected argument 'True': a flag that is on or off has no value"),
            ("--gradient_checkpointing True", "must be one of none, selective, full; got 'True'"),
            ("--gradient_checkpointing", "--gradient-checkpointing needs a value: none, selective, full$"),
            ("--output_dir", "--output-dir needs a value: OUTPUT_DIR$"),
            ("--model model --save ./model", "save must be another folder than model, which it would replace; got ./"),
            # forms of data
            ("--data qa.csv", "first record has .*'answer', .*: --columns question=prompt,answer=completion"),
            ("--data qa.csv --columns qestion=prompt,answer=completion", r"no 'qestion'; did you mean question\?"),
            ("--data chats.jso", r"(no dataset 'chats.jso'|'chats.jso' is not a file).*; did you mean chats.jsonl\?"),
            ("--data roles.jsonl", r"messages: no role 'Asistant'; did you mean assistant\?"),
            ("--data alpaca.jsonl", "--columns instruct=prompt,output=completion renames them"),
            ("--data list.json", "list.json, record 1: a record must be an object, got int"),
            ("--data chats.jsonl --eval-data chat.jsonl", r"eval_data chat.jsonl: no such file: .* mean chats"),
        )
    ),
    ("bench step --sequence_len 512", r"liger bench step: no flag --sequence_len; did you mean --seq\?"),
    ("train extra", "liger train: unexpected argument 'extra'; liger train --help lists"),
    ("train --batch x", "liger train: --batch must be a whole number, got 'x'"),
    ("train --precision fp23", r"--precision must be one of auto, fp32, .*; got 'fp23'; did you mean fp32\?"),
    ("train --parallel deepspeed-z3", "trainer torch offers parallel none, ddp, fsdp2, .*; got deepspeed-z3"),
    *((f"train --trainer {t} --nonfinite skip", f"{t} offers nonfinite stop; got skip") for t in ("hf", "lightning")),
    *((f"train --trainer {t} --parallel tp", f"{t} offers parallel .*; got tp") for t in ("hf", "lightning")),
    ("train --store nonsense --checkpoint-every 1", "store must be a URI, such as s3://.*; got 'nonsense'"),
    ("train --device cpuu", r"cannot use device 'cpuu': it must be cpu, cuda or cuda:N; did you mean cpu\?"),
    *without_gpu("train --device cuda", "device is cuda:0, but PyTorch sees no GPU here"),
    ("train --report tensorbord", r"report must be of tensorboard, .*; did you mean tensorboard\?"),
    ("train --nproc 2 --parallel ddp --rdzv-endpoint host", "rdzv_endpoint must be HOST:PORT, such as .*; got 'host'"),
    ("train --nproc 2 --parallel ddp --nnodes x", "nnodes must be N or MIN:MAX with 1 <= MIN <= MAX, got 'x'"),
    # adapters, FP8, optimizers
    *(
        (f"train {line}", said)
        for line, said in (
            ("--lora -1", "lora must be at least 0, got -1"),
            ("--lora 0 --dora", "dora needs lora, a rank of 1 or more"),
            ("--lora-alpha 32", "lora_alpha needs lora, a rank of 1 or more"),
            ("--quantize nf4", "quantize nf4 needs lora, a rank of 1 or more"),
            ("--lora 4 --lora-alpha 0", "lora_alpha must be positive, got 0.0"),
            ("--lora 4 --lora-dropout 1", r"lora_dropout must be in \[0, 1\), got 1.0"),
            ("--lora 4 --lora-dropout -0.1", r"lora_dropout must be in \[0, 1\), got -0.1"),
            ("--lora 4 --lora-targets q_proj,,v_proj", "lora_targets must be all-linear, or names of layers"),
            ("--lora 4 --lora-targets all-linear,v_proj", "lora_targets must be all-linear, or names of layers"),
            ("--lora 4 --parallel tp", "lora needs parallel none, ddp, .*, got tp"),
            ("--lora 4 --quantize int8 --dora", "dora needs quantize nf4, fp8 or none"),
            ("--lora 4 --quantize int8 --parallel fsdp2", "quantize int8 needs parallel none or ddp, got fsdp2"),
            ("--fp8-filter o_proj", "fp8_filter o_proj needs fp8 tensorwise, .*, got none"),
            ("--fp8-head", "fp8_head needs fp8 tensorwise, .*, got none"),
            ("--fp8 rowwise --fp8-filter o_proj,,mlp", "fp8_filter must be names of layers .*; got 'o_proj,,mlp'"),
            ("--fp8 rowwise --kernels off", "fp8 rowwise needs kernels on"),
            ("--fp8 rowwise --lora 8", "fp8 rowwise needs lora 0, got 8"),
            ("--fp8 rowwise --parallel tp", "fp8 rowwise needs parallel none, ddp or fsdp2, got tp"),
            ("--optimizer adamw-8bit --parallel tp", "adamw-8bit needs parallel none, ddp, .*, got tp"),
            ("--optimizer adamw-bf16 --parallel ddp", "needs parallel none, fsdp2 or ulysses-fsdp2, got ddp"),
            ("--optimizer adamw-8bit --parallel fsdp2 --trainer hf", "parallel fsdp2 needs trainer torch, got hf"),
            ("--optimizer adamw-bf16", "so it needs precision bf16; got precision auto"),
            ("--optimizer adamw-8bit-bf16 --precision bf16 --lora 4", "needs precision bf16; got lora 4"),
            ("--optimizer-in-backward", "optimizer_in_backward needs grad_clip 0, got 1: "),
            ("--optimizer-in-backward --trainer hf", "optimizer_in_backward needs trainer torch, got hf"),
            ("--optimizer-in-backward --parallel ddp", "in_backward needs parallel none, fsdp2 .*, got ddp: "),
            ("--optimizer-in-backward --grad-clip 0 --accumulate 2", "in_backward needs accumulate 1, got 2: "),
            ("--optimizer-in-backward --grad-clip 0 --nonfinite skip", "in_backward needs nonfinite stop, got skip"),
            ("--optimizer-on-cpu", "optimizer_on_cpu needs parallel fsdp2 or ulysses-fsdp2, got none: "),
            ("--optimizer-on-cpu --parallel fsdp2 --trainer hf", "optimizer_on_cpu needs trainer torch, got hf"),
            ("--optimizer-on-cpu --parallel fsdp2 --optimizer adamw-8bit", "needs optimizer adamw, got adamw-8bit: "),
            (
                "--optimizer-on-cpu --parallel fsdp2 --optimizer-in-backward --grad-clip 0",
                "optimizer_on_cpu needs optimizer_in_backward False, got True: ",
            ),
        )
    ),
    # its config files
    ("train --config confg.yaml", r"cannot read confg.yaml: No such file or directory; did you mean config.yaml\?"),
    ("train --config 24gb-qlora-8b", "cannot read .*; the recipe of that name .* liger recipes 24gb-qlora-8b"),
    ("train --config config.yaml", r"config.yaml: unknown name 'stepz'; did you mean steps\?"),
    ("train --config others.yaml", r"others.yaml: unknown name 'num_train_epochs'; did you mean epochs\?"),
    ("train --config types.yaml", "types.yaml: steps must be of type int, got 'many'"),
    ("train --config choice.json", r"precision must be one of .*; got 'fp23'; did you mean fp32\?"),
    ("train --config text.txt", "text.txt is not valid JSON"),
    ("train --config empty", "cannot read empty: Is a directory"),
    # its data
    ("train --data org/name/more", "no such folder: org/name/more"),
    ("train --data stdlb", rf"no dataset 'stdlb': {NO_HUB} .*; did you mean stdlib\?"),
    ("train --data bad.parquet", "bad.parquet: Parquet magic bytes not found"),
    ("train --data text.md", "data must be a .jsonl, .parquet, .csv, .tsv, .json or .txt file or a folder .*text.md"),
    ("train --data empty", "no .jsonl, .parquet, .csv, .tsv, .json or .txt files in empty"),
    ("train --data one.jsonl --vocab 300", "the data is shorter than one row of 512 tokens: lower the length"),
    # its model, tokenizer and folders
    (f"train --lora 8 --lora-targets q_prj {ON_CPU}", r"llama has no layer 'q_prj' .*; did you mean q_proj\?"),
    (f"train --geglu --vocab 300 --layers 1 {ON_CPU}", "llama has no kernel flag geglu; its flags are rope, .*swiglu"),
    ("train --model nope", rf"no model 'nope': {NO_HUB} "),
    ("train --model ./modle", r"no such folder: ./modle; did you mean model\?"),
    ("train --model model/tuned", "no such folder: model/tuned; .* fetch it first: hf download model/tuned$"),
    ("train --data model/chats", "no such folder: model/chats; .*: hf download --repo-type dataset model/chats$"),
    ("train --model empty", "empty holds no tokenizer: it has no tokenizer.json or tokenizer_config.json"),
    ("train --save text.txt/model", "cannot write to text.txt/model: .* is a file, not a folder"),
    ("train --cache text.txt", "cannot write to text.txt"),
    # chat, merge
    ("chat", "liger chat: the following arguments are required: FOLDER"),
    ("chat ./modle", r"no such folder: ./modle; did you mean model\?"),
    ("chat empty", "empty holds neither a model nor adapters"),
    ("chat model --base one", "model holds no adapters: leave out --base"),
    ("chat model --prompts chat.jsonl", r"no such file: chat.jsonl; did you mean chats.jsonl\?"),
    ("chat model --tokens 0", "--tokens must be at least 1, got 0"),
    ("chat adapters", "the base of adapters had random weights, which are in no file: train adapters over a --model"),
    ("merge adapters --out model", "model is there and not an empty folder: give a new --out"),
    ("merge model --out new", "model is no folder of adapters: a whole model needs no merge"),
    ("merge adapters --out new --base ./modle", r"no such folder: ./modle; did you mean model\?"),
    # demo
    ("demo --out text.txt", "cannot write to text.txt"),
    # models
    ("models lama", r"no model type 'lama'; did you mean llama\?"),
    ("models --check --write", "argument --write: not allowed with argument --check"),
    ("models llama --write", "--write writes the whole table: leave out the model types"),
    # ops and env
    ("ops rms_nrm", r"liger ops: no operator 'rms_nrm'; did you mean rms_norm\?"),
    ("env --all", "liger env: no flag --all"),
    # bench
    ("bench rms_nrm", r"liger bench: no operator 'rms_nrm'; did you mean rms_norm\?"),
    ("bench --case nope", "no case 'nope'"),
    ("bench rms_norm --sweep tokens", "no sweep 'tokens'; there are hidden"),
    ("bench rms_norm --mode sideways", "no mode 'sideways'; there are forward, backward, full"),
    ("bench rms_norm --dtype bf15", r"no dtype 'bf15'; did you mean bf16\?"),
    ("bench rms_norm --repeats 0", "--repeats must be at least 1, got 0"),
    ("bench rms_norm --upstream-path nowhere", "no such folder: nowhere; `pip install --no-deps --target nowhere "),
    ("bench rms_norm --against upstream --upstream-path empty", "empty holds no liger_kernel; `pip install"),
    ("bench rms_norm --base nope", "--base(: no git revision 'nope'| needs a git checkout| needs git)"),
    ("bench rms_norm --json empty", "cannot write to empty: it is a folder"),
    ("bench rms_norm --resume", "--resume needs --json FILE"),
    ("bench rms_norm --resume --json list.json", "list.json holds no results"),
    # bench report
    ("bench report", "liger bench report: the following arguments are required: json"),
    ("bench report step.json", r"no such file: step.json; did you mean steps.json\?"),
    ("bench report list.json", "list.json holds no results: give a file that `liger bench --json` or"),
    ("bench report row.json", "row.json holds no results"),
    ("bench report empty", "empty is a folder: give a file"),
    ("bench report norows.json", "norows.json: no rows, so there is no table"),
    ("bench report operators.json steps.json", "the files hold rows of operators and of steps"),
    ("bench report steps.json --csv config.yaml", "cannot write to config.yaml: it holds something else"),
    # bench step
    ("bench step --model llama-3.2-1", r"liger bench step: no model 'llama-3.2-1'; did you mean llama-3.2-1b\?"),
    ("bench step --against our", r"no variant 'our'; did you mean ours\?"),
    ("bench step --upstream-path empty", "--upstream-path empty holds no liger_kernel"),
    ("bench step --batch 4,x", "--batch must be numbers, comma-separated, got '4,x'"),
    ("bench step --lengths -5", "--lengths must be at least 0, got -5"),
    ("bench step --masked nan", r"--masked must be in \[0, 1\), got nan"),
    ("bench step --peak-tflops -1", "--peak-tflops must be positive, got -1"),
    ("bench step --optimizer-on-cpu", "--optimizer-on-cpu needs --optimizer adamw, got sgd"),
    ("bench step --gpus 2 --optimizer adamw-bf16", "optimizer adamw-bf16 needs parallel none, .*, got ddp"),
    ("bench step --lora 8 --lora-targets q_prj", r"no linear layer 'q_prj'; did you mean q_proj\?"),
    ("bench step --model model", "--model model needs --data FILE: rows of your own"),
    ("bench step --data chats.jsonl", "--data chats.jsonl needs --model: a folder or an id of the hub"),
    ("bench step --model model --data=chats.jsonl --seq x", "--length must be a whole number, got .x."),
    *(
        (f"bench step {line}", said)
        for line, said in (
            ("--steps 1 --warmup 1", "must add up to 4"),
            ("--smoke --model lfm2-1.2b", "--smoke has its own --model: leave one of them out"),
            ("--batch 4,0", "--batch must be at least 1, got 0"),
            ("--batch 4,8 --profile", "need a single --batch"),
            ("--parallel ulysses --against upstream", "upstream has no --parallel ulysses"),
            ("--gpus 2 --parallel ep", "--parallel ep needs a mixture of experts, got llama-3.2-1b"),
            ("--parallel ep --model mixtral-8x7b --lora 8", "--parallel ep trains all weights"),
            ("--lora -1", "--lora must be at least 0, got -1"),
            ("--lora 8 --lora-dropout 1", "--lora-dropout must be in"),
            ("--lora 8 --lora-targets q_proj,head", "no linear layer 'head'; there are q_proj"),
            ("--quantize nf4", "--quantize needs --lora R"),
            ("--lora 8 --quantize fp8", "stock has no frozen FP8 base"),
            ("--lora 8 --quantize nf4 --against ours:fp8", "ours:fp8 has its own base"),
            ("--against ours:bf16", "ours:bf16 needs --fp8 tensorwise"),
            ("--fp8 rowwise_with_gw_hp --against ours:head", r"ours:head needs --fp8 tensorwise\|rowwise$"),
            ("--fp8 tensorwise --lora 8", "--fp8 trains the weights themselves: leave out --lora"),
        )
    ),
    # bench mismatch
    ("bench mismatch --against ours:head", "no row 'ours:head'"),
    ("bench mismatch --batch 0", "--batch must be at least 1, got 0"),
    ("bench mismatch --temperature 0", "--temperature must be positive, got 0"),
    ("bench mismatch --model qwen", "no model 'qwen'"),
    ("bench mismatch --model some/checkpoint --layers 2", "--layers is for models in random weights"),
    # tune
    ("tune rms_nrm", r"liger tune: no operator 'rms_nrm'; did you mean rms_norm\?"),
    ("tune rms_norm --case lama", r"no case 'lama'; did you mean llama\?"),
    *without_gpu("tune rms_norm", "tuning needs a GPU"),
    # warmup
    ("warmup", "liger warmup: give --model NAME or --config FILE"),
    ("warmup --model tiny --config config.yaml", "give --model or --config, not both"),
    ("warmup --model nope", rf"liger warmup: no model 'nope': {NO_HUB} "),
    ("warmup --model tiny --arch sm9", r"--arch must be one of sm80, .*; got 'sm9'; did you mean sm90\?"),
    ("warmup --model wrong.json --arch sm90", r"no such file: wrong.json; did you mean wrong(type|size).json\?"),
    ("warmup --model wrongtype.json --arch h100", r"no model type 'lama'; did you mean llama\?"),
    ("warmup --model wrongsize.json --arch sm90", "cannot read the configuration of wrongsize.json: .*hidden_size"),
    ("warmup --model text.txt --arch sm90", "cannot read the configuration of text.txt: "),
    ("warmup --config noname.json --arch sm90", "noname.json names no model"),
    # fit
    ("recipes 24gb-qlora", r"24gb-qlora-8b"),
    ("fit --gpu h100", r"liger fit: give --model, a config.json, .*, or one of llama-3.2-1b, "),
    ("fit --model tiny --gpu h20", r"liger fit: no GPU 'h20'; did you mean h200\?"),
    ("fit --model tiny --gpu h100 --kernels off --tiled-mlp 3", "tiled_mlp needs kernels on, got off"),
    ("fit --model tiny --gpu h100 --cpu-memory-gb 0", "--cpu-memory-gb must be positive and finite, got 0"),
    ("fit --model tiny --memory-gb 1 --nproc 4", "4 ranks need --parallel ddp, fsdp2, tp or ulysses"),
    ("fit --model tiny --nproc 0 --parallel ddp --gpu h100", "--nproc must be the number of GPUs of a machine, got 0"),
    ("fit --model tiny --gpu h100 --nproc 2 --nnodes x --parallel ddp", "nnodes must be N or MIN:MAX"),
    ("fit --model tiny --gpu h100 --nproc 4 --parallel ulysses --sequence-parallel-size 3", "the 4 ranks, got 3"),
    ("fit --model tiny --gpu h100 --parallel deepspeed-z3 --trainer hf", "parallel deepspeed-z3 is not known"),
    *without_gpu("fit --model tiny", "this machine has no GPU: give --gpu, one of a100-40, .*, or --memory-gb"),
    # deploy
    ("deploy", "liger deploy: the following arguments are required: COMMAND"),
    ("deploy rendr job.yaml", r"liger deploy: no command 'rendr'; did you mean render\?"),
    ("deploy render jib.yaml", r"cannot read jib.yaml: No such file or directory; did you mean job.yaml\?"),
    ("deploy render job.yaml", r"job.yaml: unknown name 'imag'; did you mean image\?"),
    ("deploy render kind.yaml", r"kind must be one of pytorchjob, .*; got 'jobsett'; did you mean jobset\?"),
    ("deploy render trainjob.yaml", r"train: unknown name 'checkpoint_evry'; did you mean checkpoint_every\?"),
    ("deploy render notrain.yaml", "notrain.yaml: train must be given"),
    ("deploy render goodjob.yaml --as helm", r"helm is \d+ files: give --to DIR"),
    ("deploy render goodjob.yaml --to text.txt", "cannot write to text.txt"),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with files of all kinds, on a machine that reaches no hub."""
    import huggingface_hub

    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGER_TRACEBACK", raising=False)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", _unreachable)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # then it is not even asked


def _unreachable(self, *args, **kwargs):
    raise ConnectionError("Name or service not known")


def own(err: str) -> str:
    """What liger and Python print; other packages (bitsandbytes, torchao) have lines and
    warnings of their own when they are imported."""
    assert "Traceback" not in err, err
    ours = "liger", "usage", "Exception", "BrokenPipe"
    return "".join(line for line in err.splitlines(keepends=True) if line.startswith(ours))


@pytest.mark.parametrize("line, said", TABLE, ids=[row[0] for row in TABLE])
def test_a_mistake_takes_one_line(line, said, here, capsys):
    assert main(line.split()) == 2
    err = own(capsys.readouterr().err)
    assert err.count("\n") == 1 and err.startswith("liger") and re.search(said, err), err


def test_every_command_has_its_mistakes():
    assert {line.split()[0] for line, _ in TABLE} >= set(COMMANDS)


@pytest.mark.parametrize(
    "found, said", [("RepositoryNotFoundError", "has no public model of that name"), ("GatedRepoError", None)]
)
def test_the_hub_is_asked_once(found, said, here, monkeypatch):
    import huggingface_hub
    from huggingface_hub import errors

    from liger_kernel.train.hub import on_hub
    from liger_kernel.train.mistakes import UserError

    asked = []

    def repo_info(self, name, **kwargs):
        asked.append(name)
        error = getattr(errors, found)
        raise error.__new__(error)

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)
    monkeypatch.delenv("RANK", raising=False)
    if said:
        with pytest.raises(UserError, match=said):
            on_hub("org/nope")
    else:
        on_hub("org/nope")
    assert asked == ["org/nope"]
    on_hub("model")  # a folder
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "cache")
    Path("cache/models--org--cached/snapshots").mkdir(parents=True)
    on_hub("org/cached")
    monkeypatch.setenv("RANK", "0")
    on_hub("org/nope")
    for path in ("./nope", "model/nope"):  # a path is a path for each rank
        with pytest.raises(UserError, match=f"no such folder: {path}"):
            on_hub(path)
    assert asked == ["org/nope"]


# -- help, pipes and Ctrl-C ------------------------------------------------------------------

HELP = [[], *([name] for name in COMMANDS), ["bench", "step"], ["bench", "report"]]
HELP += [["deploy", name] for name in ("render", "submit", "status", "logs", "delete")]
HEAVY = {"torch", "triton", "transformers", "numpy", "matplotlib", "huggingface_hub"}
TIMED = f"""
import json, sys, time
start = time.process_time()
from liger_kernel.cli import main
try:
    main([*sys.argv[1:], "--help"])
except SystemExit as stop:
    assert stop.code == 0
seconds, code = time.process_time() - start, main([*sys.argv[1:], "--nope"])
print("LOADED", json.dumps([seconds, code, sorted({HEAVY!r} & sys.modules.keys())]))
"""


@pytest.mark.parametrize("command", HELP, ids=" ".join)
def test_help_and_mistakes_in_flags_import_nothing_heavy(command):
    done = subprocess.run([sys.executable, "-c", TIMED, *command], capture_output=True, text=True, check=True)
    seconds, code, heavy = json.loads(done.stdout.rpartition("LOADED ")[2])
    assert done.stdout.startswith(f"usage: liger {' '.join(command)}".rstrip()) and not heavy
    assert seconds < 3  # 0.1 s; torch and transformers together take longer
    assert code == 2 and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("line", ["deploy render deploy/jobs/plain.yaml", "--help", *further("ops", "train --help")])
def test_a_pipe_that_is_closed_is_no_mistake(line):
    """``liger ... | head``: no traceback, no line, and the exit code that shells have for it."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "liger_kernel.cli", *line.split()]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode in ((141, 0) if "--help" in line else (141,)) and not own(done.stderr)


def test_ctrl_c_takes_one_line(tmp_path, user_env):
    """While it trains, here at the first progress line."""
    (tmp_path / "text.jsonl").write_text('{"text": "%s"}\n' % ("def add(a, b): return a + b. " * 60))
    flags = "--data text.jsonl --length 24 --batch 2 --steps 100000 --vocab 300 --hidden 32 --heads 2 --layers 1"
    flags += " --log-every 1 --device cpu --eval-fraction 0"
    # a shell's background jobs do not hear it
    heard = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    said, main = tmp_path / "said", f"{heard}; from liger_kernel import cli; sys.exit(cli.main(sys.argv[1:]))"
    argv, env = ["-c", main, "train", *flags.split()], user_env | {"CUDA_VISIBLE_DEVICES": ""}
    child = processes.forkserver().Process(target=processes.run_script, args=(argv, env, said, tmp_path))
    child.start()
    processes.until(lambda: not child.is_alive() or (said.exists() and "\nstep " in said.read_text()))
    os.kill(child.pid, signal.SIGINT)
    child.join(60)
    found = said.read_text()
    assert child.exitcode == 130 and found.endswith("liger train: interrupted\n") and "Traceback" not in found, found


# -- Python: apply functions and auto classes ------------------------------------------------


def test_a_name_that_is_not_there_is_answered_with_the_nearest():
    import liger_kernel.transformers as liger

    for wrong, right in (
        ("apply_liger_kernel_to_lama", "apply_liger_kernel_to_llama"),
        ("LigerRMSnorm", "LigerRMSNorm"),
        ("projection_report", "projections_report"),
    ):
        with pytest.raises(AttributeError, match=f"has no attribute '{wrong}'; did you mean {right}\\?"):
            getattr(liger, wrong)
    assert not hasattr(liger, "__wrapped__")


@pytest.mark.parametrize(
    "args, kwargs, said",
    [
        ((), dict(model="llama"), r"got 'llama'; AutoLigerKernelForCausalLM.from_pretrained\('llama'\) loads"),
        ((), dict(model=3), "model must be a model that is built"),
        ((), dict(rms_nrm=True), r"unexpected keyword argument 'rms_nrm'; did you mean rms_norm\?"),
        ((), dict(foo=True), "unexpected keyword argument 'foo'; it takes rope, .*projections"),
        ((), dict(rope="no"), "rope must be True or False, got 'no'"),
        ((torch.nn.Linear(1, 1),), {}, r"rope must be True or False, got a model \(Linear\); pass the model by"),
    ],
)
def test_arguments_of_apply_functions(args, kwargs, said):
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    with pytest.raises(TypeError, match=r"apply_liger_kernel_to_llama\(\): .*" + said):
        apply_liger_kernel_to_llama(*args, **kwargs)


def test_arguments_of_auto_classes():
    import transformers

    from liger_kernel.transformers import AutoLigerKernelForCausalLM, restore

    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    config = transformers.LlamaConfig(vocab_size=16, **sizes)
    for wrong, right in (("rms_nrm", "rms_norm"), ("rematerialize", "rematerialise")):
        with pytest.raises(TypeError, match=f"AutoLiger.*: no argument '{wrong}'; did you mean {right}\\?"):
            AutoLigerKernelForCausalLM.from_config(config, **{wrong: True})
    config.rms_nrm = 1  # transformers' own arguments, and fields of a configuration, pass
    AutoLigerKernelForCausalLM.from_config(config, attn_implementation="eager", rms_norm=False)
    restore("llama")


def test_a_model_type_that_is_nearly_one_is_named():
    from liger_kernel.transformers import _apply_liger_kernel
    from liger_kernel.transformers.patching.patches import WARNED

    WARNED.clear()
    said = r"lama: liger_kernel has no kernels for this type of model, .*; did you mean llama\?"
    with pytest.warns(UserWarning, match=said):
        _apply_liger_kernel("lama")


def test_nearest():
    assert did_you_mean("RMSNorm", ["rms_norm", "rope"]) == "; did you mean rms_norm?"
    assert did_you_mean("zzz", ["rms_norm"]) == ""
    flags = [field.name for field in dataclasses.fields(TrainConfig)]
    for ours, theirs in (*ALIASES.items(), *SYNONYMS.items()):
        own, *value = ours.partition(",")[0].split()
        right = " ".join([own.replace("-", "_"), *value])
        for name in theirs.split():  # none is a flag already, or said to be two things
            assert own.replace("-", "_") in flags and name.replace("-", "_") not in flags
            assert did_you_mean(name, flags) == f"; did you mean {right}?"
    assert no_such("flag", "zzz", ["a", "b"]) == "no flag 'zzz'; there are a, b"
    assert no_such("flag", "zzz", map(str, range(1000))) == "no flag 'zzz'"
