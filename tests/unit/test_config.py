"""A wrong key of a recipe is told with the key that was likely meant."""

import pytest

from deepswe.config import Recipe, build_recipe, load_sandbox
from deepswe.errors import ConfigError


def recipe(**sections: object) -> Recipe:
    return build_recipe({"run": {"name": "r"}, "tasks": {"kind": "micro"}, **sections}, origin="r.toml")


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"training": {"step": 3}}, "training.step is not a known key (value 3), did you mean training.steps?"),
        ({"trainng": {"steps": 3}}, "did you mean training?"),
        ({"model": {"lora": {"rnk": 3}}}, "did you mean model.lora.rank?"),
        ({"tasks": {"kind": "micro", "trian": 3}}, "did you mean tasks.train?"),
        ({"tasks": {"kind": "taskset", "path": "x", "sampler": {"hihg": 1}}}, "did you mean tasks.sampler.high?"),
        ({"sandbox": {"kubernetes": {"tolerations": [{"kye": "a"}]}}}, "sandbox.kubernetes.tolerations.key?"),
    ],
)
def test_an_unknown_key_is_told_with_a_similar_one_of_its_section(sections: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as failure:
        recipe(**sections)
    assert said in str(failure.value)


def test_a_key_of_another_section_is_told_with_each_section_that_has_it() -> None:
    with pytest.raises(ConfigError, match=r"did you mean rollout\.group_size\?"):
        recipe(training={"group_size": 3})
    with pytest.raises(ConfigError, match=r"did you mean imitation\.steps or training\.steps\?"):
        recipe(steps=3)


def test_a_key_that_is_like_no_other_gets_no_guess() -> None:
    with pytest.raises(ConfigError, match=r"zzz is not a known key \(value 3\)$"):
        recipe(zzz=3)


def test_the_sandbox_alone_gets_the_same_advice() -> None:
    with pytest.raises(ConfigError, match="did you mean memory_mib"):
        load_sandbox(["sandbox.memory=3"])


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"engine": {"backend": "vllm", "dtype": "float32"}}, "the vLLM servers have the type"),
        (
            {"model": {"dtype": "bfloat16", "lora": {"rank": 2}}, "engine": {"dtype": "float32"}},
            "holds the frozen weights in bfloat16; leave engine.dtype empty",
        ),
        ({"engine": {"dtype": "float16"}}, "engine.dtype"),
    ],
)
def test_an_engine_s_type_that_cannot_be_is_refused(sections: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as failure:
        recipe(**sections)
    assert said in str(failure.value)


def test_the_engine_has_the_model_s_type_unless_it_has_its_own() -> None:
    assert recipe(model={"dtype": "bfloat16"}).engine_dtype == "bfloat16"
    assert recipe(model={"dtype": "bfloat16"}, engine={"dtype": "float32"}).engine_dtype == "float32"
    frozen = {"dtype": "float32", "lora": {"rank": 2}}
    assert recipe(model=frozen, engine={"dtype": "bfloat16"}).engine_dtype == "bfloat16"
