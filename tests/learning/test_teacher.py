"""On-policy distillation: a teacher's logprobs as advantages."""

import json
import shutil

import pytest
import torch
from kit import learn, run, sample, steps, words
from oracle import distributions, logprobs
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_core.algorithms import make_algorithm
from rl_core.config import parse_config
from rl_core.environments.env_file import load_env
from rl_core.learners import make_learners
from rl_core.learning.teachers.build_teacher import check_teachers
from rl_core.run.display.warnings import compares_groups
from rl_core.run.plan.algorithm_choice import choose_algorithm
from rl_core.run.plan.model_checks import checked_chat
from rl_core.run.process.joining import init_ranks
from rl_core.tools.replay import replay

SAMPLE = sample([5, 6, 7, 8], [0, 0, 1, 1], 0.0, "a")
ASK = """
def load_tasks(split):
    return [{"messages": [{"role": "user", "content": text}]} for text in ("ab?", "cd?", "ef?")]


def reward_fn():
    return 0.0
"""


@pytest.fixture(scope="module")
def teacher(make_model):
    return make_model(seed=7)


def test_a_student_comes_nearer_to_its_teacher(tmp_path, tiny_model, teacher):
    (tmp_path / "ask.py").write_text(ASK)
    flags = (
        "--algorithm opd --max_tokens 12 --tasks_per_step 4 --group_size 8 --num_steps 12 "
        "--optim.lr 1e-2 --algo.teacher"
    )
    model = ["--model", tiny_model, "--env_path", tmp_path / "ask.py"]
    # It learns though all rewards are equal.
    out = run(tmp_path / "run", *model, flags, teacher)
    kl = [row["learn/policy/teacher_kl_nats"] for row in steps(out)]
    assert sum(kl[-3:]) < 0.8 * sum(kl[:3]), kl


def test_a_frozen_actor_of_the_run_may_be_the_teacher_of_one_actor(tmp_path, tiny_model, teacher):
    (tmp_path / "ask.py").write_text(ASK + "turns = 'bob'\n")
    flags = (
        f"--actors.bob.model {tiny_model} --actors.eve.model {teacher} --actors.eve.train false "
        "--actors.bob.algorithm opd --actors.bob.algo.teacher eve --max_tokens 4 "
        f"--tasks_per_step 2 --group_size 2 --num_steps 1 --env_path {tmp_path / 'ask.py'}"
    )
    out = run(tmp_path / "run", flags)
    assert steps(out)[0]["learn/bob/teacher_kl_nats"] > 0


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path, tiny_model):
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    known = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    last = max(known) + 1
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    flags = ["--model", tiny_model, "--env_path e.py --out x --algorithm opd --algo.teacher", other]
    with pytest.raises(ValueError, match=f"token {last} is '<new>' instead of None"):
        check_teachers(parse_config(words(*flags)), "policy")


TWO = "--env_path e.py --out x --actors.eve.model {eve} --actors.bob.model {bob} "
TAUGHT = "--actors.bob.algorithm opd --actors.bob.algo.teacher eve "


def two_actors(bob, eve, more: str = ""):
    return parse_config(words((TWO + TAUGHT + more).format(bob=bob, eve=eve)))


def learners_of(config) -> dict:
    algorithms = {}
    for name in config.trained:
        algorithms[name] = make_algorithm(config.of(name).algorithm, config.of(name).algo)
    return make_learners(config, algorithms, init_ranks(60))


def test_an_actor_that_learns_teaches_as_it_was_before_its_own_update(tiny_model, teacher):
    config = two_actors(tiny_model, teacher, "--engine embedded --sampling.temperature 0.6")
    learners = learners_of(config)
    # It learns after its pupil, though it is named first.
    assert list(learners) == ["bob", "eve"]
    (minibatch,), _ = learners["bob"].shard([SAMPLE])
    other = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    for _ in range(2):
        kl = learners["bob"].annotate([minibatch])["teacher_kl_nats"].value
        with torch.no_grad():
            gain = logprobs(other, SAMPLE, 0.6) + 4.6
        assert kl == pytest.approx(-gain.mean().item(), abs=1e-4)
        # Whatever it learns, it teaches then.
        for weight in other.parameters():
            weight.data *= 1.1
        for weight in learners["eve"].policy.hf.parameters():
            weight.data *= 1.1


def test_an_actor_that_trains_an_adapter_teaches_with_it(tiny_model, teacher):
    config = two_actors(tiny_model, teacher, "--engine embedded --actors.eve.lora.rank 4")
    learners = learners_of(config)
    torch.manual_seed(0)
    for _, weight in learners["eve"].trained_parameters():
        weight.data.normal_(std=0.2)
    (minibatch,), _ = learners["bob"].shard([SAMPLE])
    kl = learners["bob"].annotate([minibatch])["teacher_kl_nats"].value
    kls = []
    for weights in ({}, dict(learners["eve"].named_weights())):
        other = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
        other.load_state_dict(weights, strict=False)
        with torch.no_grad():
            kls.append(-(logprobs(other, SAMPLE) + 4.6).mean().item())
    assert kl == pytest.approx(kls[1], abs=1e-4) != pytest.approx(kls[0], abs=1e-2)


def test_the_head_of_a_teacher_that_learns_is_read_again(tiny_model, teacher):
    config = two_actors(tiny_model, teacher, "--actors.bob.algo.teacher_loss forward_kl")
    learners = learners_of(config)
    student = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    other = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    losses = []
    for step in range(2):
        [row] = learn(learners["bob"], [SAMPLE], first=step)
        with torch.no_grad():
            logp, logq = (distributions(model, SAMPLE, 1.0) for model in (student, other))
        # One step at 1e-6 does not move the student.
        losses.append((logq.exp() * (logq - logp)).sum(-1).mean().item())
        assert row["teacher_loss_nats"] == pytest.approx(losses[-1], abs=1e-4)
        # Embeddings that are tied to the head move too, so that hidden states stay far from 0.
        for model in (other, learners["eve"].policy.hf):
            head = model.get_output_embeddings()
            head.weight.data = head.weight.data.roll(1, 0)
    assert abs(losses[0] - losses[1]) > 0.01


def test_actors_that_teach_each_other_or_themselves_are_refused(tiny_model):
    mutual = two_actors(tiny_model, tiny_model, "--actors.eve.algo.teacher bob")
    with pytest.raises(ValueError, match="of eve, bob each is taught by a trained actor"):
        check_teachers(mutual.of("bob"), "bob")
    flags = "--env_path e.py --out x --algorithm opd --algo.teacher policy --model"
    with pytest.raises(ValueError, match="give one of them a frozen teacher"):
        check_teachers(parse_config(words(flags, tiny_model)), "policy")


def test_two_environments_are_taught_in_a_run(tmp_path, tiny_model, teacher):
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(ASK)
    flags = (
        f"--env_path {tmp_path / 'one.py'},{tmp_path / 'two.py'} --algorithm opd --max_tokens 4 "
        f"--tasks_per_step 2 --group_size 2 --num_steps 2 --algo.teacher {teacher} "
        f"--envs.two.teacher none --algo.teacher_loss jsd --model {tiny_model}"
    )
    losses = [row["learn/policy/teacher_loss_nats"] for row in steps(run(tmp_path / "run", flags))]
    assert len(losses) == 2 and min(losses) > 0


def test_rewards_by_advantage_fn_are_not_added_to_a_teacher_unasked(tmp_path):
    (tmp_path / "own.py").write_text(ASK + "\n\ndef advantage_fn(rewards):\n    return rewards\n")
    envs = {"own": load_env(str(tmp_path / "own.py"))}
    flags = "--model m --env_path own.py --out x --algorithm opd --algo.teacher t"
    with pytest.raises(ValueError, match=r"own\.py defines advantage_fn, which --algorithm opd"):
        choose_algorithm(parse_config(words(flags)), envs)
    asked = parse_config(words(flags, "--algo.advantage custom"))
    assert choose_algorithm(asked, envs).advantage == "custom"


def test_a_teacher_that_cannot_judge_is_refused_before_it_loads(tmp_path, tiny_model):
    short = tmp_path / "short"
    shutil.copytree(tiny_model, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    flags = "--env_path e.py --out x --algorithm opd --model"
    for teacher, message in ((short, "short has 16 positions"), (tmp_path / "none", "none")):
        arguments = words(flags, tiny_model, "--algo.teacher", teacher)
        with pytest.raises(ValueError, match=message) as caught:
            checked_chat(parse_config(arguments), "policy")
        assert "Repo id" not in str(caught.value)


def test_equal_rewards_beside_a_teacher_are_no_reason_for_a_warning():
    flags = words("--model m --env_path e.py --out x")
    assert compares_groups(parse_config(flags))
    assert not compares_groups(parse_config([*flags, "--algo.teacher", "t"]))


def test_a_step_replayed_with_another_objective_has_the_same_teacher(tmp_path, tiny_model, teacher):
    (tmp_path / "ask.py").write_text(ASK)
    model = ["--model", tiny_model, "--env_path", tmp_path / "ask.py", "--algo.teacher", teacher]
    flags = "--max_tokens 6 --tasks_per_step 2 --group_size 2 --num_steps 1 --algo.kl_coef 0.1"
    out = run(tmp_path / "run", *model, flags)
    replayed = replay(out, 1, ["--algo.clip_low=0.3"])
    kl = "learn/policy/teacher_kl_nats"
    assert replayed.replayed[kl] == replayed.recorded[kl] > 0
