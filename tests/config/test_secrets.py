from __future__ import annotations

import pytest

from trainyard.config.load import load_run
from trainyard.config.run import Blend
from trainyard.config.secrets import hide, secret_problems, secret_values


def test_variables_are_secret_by_the_words_of_their_names() -> None:
    secret = {
        **{"SLACK_WEBHOOK": "https://hooks.example/T0/B0", "MY_PASSWORD": "hunter2"},
        **{"AWS_SECRET_ACCESS_KEY": "aws/secret+value", "my_passwd": "sesame"},
    }
    others = {"EMPTY_TOKEN": "", "SHORT_KEY": "abc", "TOKENIZERS_PARALLELISM": "false"}
    others |= {"KEYBOARD": "qwertz", "PWD": "/home/somebody", "MONKEY_BUSINESS": "bananas"}
    longest_first = sorted(secret.values(), key=len, reverse=True)
    assert secret_values(others | secret) == longest_first


@pytest.mark.parametrize(
    "text, shown",
    [
        ("nothing to hide: step 7, loss 3.2", "nothing to hide: step 7, loss 3.2"),
        ("it is hunter2-and-more", "it is ***"),
        ("it is hunter2.", "it is ***."),
        ("encoded: a%2Fb%3Dcdef", "encoded: ***"),
        ("https://me:pass@host:80/x s3://key@b", "https://***@host:80/x s3://***@b"),
        ("with a sign: ftp://me:p@ss@host/", "with a sign: ftp://***@host/"),
        ("https://host/blob?sv=1&sig=Zm9v%3D&x=2", "https://host/blob?sv=1&sig=***&x=2"),
        ("https://h/?X-Amz-Signature=0f&a_token=1e", "https://h/?X-Amz-Signature=***&a_token=***"),
        ("no file https:/me:pass@host/x", "no file https:/***@host/x"),
        ("https://host/a@b and me@host", "https://host/a@b and me@host"),
        ("data.prefixes=['https://me:pass@host/x']", "data.prefixes=['https://***@host/x']"),
    ],
)
def test_texts(text: str, shown: str) -> None:
    assert hide(text, ["hunter2-and-more", "a/b=cdef", "hunter2"]) == shown


def test_a_run_with_a_login_is_named_by_its_field_alone() -> None:
    good = load_run("tiny").run
    blend = Blend(prefixes=("data/web", "s3://me:letmein@bucket/web"))
    data = good.data.model_copy(update={"blend": blend})
    text = {"description": "from https://me:letmein@host/x"}
    run = good.model_copy(update={"data": data, **text})
    found = secret_problems(run.model_dump())
    assert list(found) == ["description", "data.blend.prefixes"]
    assert found["description"].startswith("description holds a URL with a login or a key, which")
    assert "letmein" not in str(found)
    assert not secret_problems(good.model_dump())
