import json
import sys
from pathlib import Path

import pytest

from deepswe.cli.main import main

RECIPE = '[run]\nname = "r"\n[tasks]\nkind = "micro"\ntrain = 1\nheldout = 1\nunseen = 0\n'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("verifier train none.toml", "none.toml cannot be read"),
        ("verifier train wrong.toml", "data.runs is missing"),
        ("verifier train v.toml", "data.phases names ('train',), but"),
        ("verifier score p.jsonl --scores s", "give --verifier DIRECTORY, or --url and --model"),
        ("verifier score p.jsonl --scores s --url http://x", "or --url and --model"),
        ("verifier score p.jsonl --scores s --verifier .", "comes without an issue"),
        ("tests run recipe.toml --candidates p.jsonl --tests none", "there are no tests in none"),
        ("tests run recipe.toml --candidates p.jsonl --tests p.jsonl", "p.jsonl is no file of generated tests"),
        ("tests run recipe.toml --candidates none", "is no run, predictions file"),
        ("tests generate recipe.toml tasks.kind=frozenlake", "tests are for repositories"),
    ],
)
def test_bad_input_is_one_clear_line(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.toml").write_text('[run]\nname = "v"\n[data]\n')
    Path("v.toml").write_text('[run]\nname = "v"\n[data]\nruns = ["p.jsonl"]\n')
    Path("recipe.toml").write_text(RECIPE)
    Path("p.jsonl").write_text(json.dumps({"instance_id": "t", "model_patch": "+"}))
    monkeypatch.setattr(sys, "argv", ["deepswe", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
