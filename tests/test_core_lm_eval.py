"""EleutherAI's lm-evaluation-harness on our models, where it is installed:

    lm_eval --model hf --model_args pretrained=EXPORT_FOLDER,trust_remote_code=True,add_bos_token=True --tasks TASK

The harness loads an export folder as it loads any model; its log-likelihoods must be ours.
"""

import json

import numpy as np
import pytest

from eval.prompts import Example
from eval.scoring import score_plain
from tests.core_helpers import VOCAB_SIZE, make_tokenizer

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402  (after importorskip)
from lm_eval.models.huggingface import HFLM  # noqa: E402

PAIRS = [
    ("The opposite of hot is", " cold"),
    ("Count on: 1, 2, 3,", " 4, 5"),
    ("Say it again.\nFirst: river stone\nAgain:", " river stone"),
    ("Question: What kind of thing is red?\nAnswer:", " color"),
]


@pytest.fixture(params=["tied", "untied"])
def model(request, tiny_config, make_model):
    tied = request.param == "tied"
    return make_model(tiny_config(vocab_size=VOCAB_SIZE, max_position_embeddings=256, tie_core=tied))


def our_loglikelihood(model, tokenizer, context, continuation):
    """(sum of log-probabilities, whether greedy) of a continuation after BOS and context."""
    whole = tokenizer(context + continuation)["input_ids"]
    start = len(tokenizer(context)["input_ids"])
    sequence = np.array([tokenizer.bos_token_id, *whole], dtype=np.int32)
    outcome = score_plain(model, Example("toy", 0, 0, [sequence], [start + 1], 0, is_choice=False))
    return -outcome.span_loss, outcome.correct


def test_log_likelihoods_are_the_harness_s(model, tmp_path):
    tokenizer = make_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    # from the folder: a tokenizer that is passed in is used as it is, without the BOS
    harness = HFLM(pretrained=str(tmp_path), add_bos_token=True, batch_size=2, device="cpu")
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
    found = harness.loglikelihood(requests, disable_tqdm=True)
    for pair, (likelihood, greedy) in zip(PAIRS, found, strict=True):
        expected, correct = our_loglikelihood(model, tokenizer, *pair)
        assert likelihood == pytest.approx(expected, abs=1e-4), pair
        assert greedy == correct


def test_a_local_task_runs_on_an_exported_model(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"query": context, "choices": [answer, " nothing"], "gold": 0} for context, answer in PAIRS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "local.yaml").write_text(
        "task: looped_local\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\n"
        "test_split: test\n"
        "output_type: multiple_choice\n"
        "doc_to_text: '{{query}}'\n"
        "doc_to_choice: '{{choices}}'\n"
        "doc_to_target: gold\n"
        "target_delimiter: ''\n"
        "metric_list: [{metric: acc}]\n"
    )
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(tmp_path / "model"), "add_bos_token": True, "device": "cpu"},
        tasks=["looped_local"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tmp_path)),
        log_samples=True,
    )
    samples = {sample["doc_id"]: sample for sample in results["samples"]["looped_local"]}
    tokenizer = make_tokenizer()
    for i, row in enumerate(rows):
        for choice, response in zip(row["choices"], samples[i]["filtered_resps"], strict=True):
            expected, _ = our_loglikelihood(model, tokenizer, row["query"], choice)
            assert response[0] == pytest.approx(expected, abs=1e-4)
