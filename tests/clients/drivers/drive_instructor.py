"""instructor, which makes objects of answers."""

import os

from drive import drive


def extract():
    import instructor
    from pydantic import BaseModel

    class Quote(BaseModel):
        item: str
        price: float

    client = instructor.from_provider("openai/" + os.environ["JAXRL_MODEL"])
    quote = client.create(
        response_model=Quote,
        messages=[{"role": "user", "content": "Milk costs 3.5. Say it as JSON."}],
    )
    return quote.model_dump()


def in_mode(name):
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class Quote(BaseModel):
        item: str
        price: float

    client = instructor.from_openai(OpenAI(), mode=getattr(instructor.Mode, name))
    return client.create(
        model=os.environ["JAXRL_MODEL"],
        response_model=Quote,
        messages=[{"role": "user", "content": "Milk costs 3.5. Say it as JSON."}],
    ).model_dump()


def tools_strict():
    return in_mode("TOOLS_STRICT")


def json_mode():
    return in_mode("JSON")


def json_schema():
    return in_mode("JSON_SCHEMA")


def markdown_json():
    return in_mode("MD_JSON")


def partial():
    import instructor
    from pydantic import BaseModel

    class Quote(BaseModel):
        item: str
        price: float

    client = instructor.from_provider("openai/" + os.environ["JAXRL_MODEL"])
    growing = client.create_partial(
        response_model=Quote,
        messages=[{"role": "user", "content": "Milk costs 3.5. Say it as JSON."}],
    )
    return list(growing)[-1].model_dump()


MODES = {
    f.__name__: f for f in (extract, tools_strict, json_mode, json_schema, markdown_json, partial)
}
if __name__ == "__main__":
    drive("instructor", MODES)
