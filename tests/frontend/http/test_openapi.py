import json

import msgspec

from frontend.http.api import Api
from frontend.http.openapi import OPERATIONS, document


def references(node):
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_every_route_is_described():
    described = {(operation.method.upper(), operation.path) for operation in OPERATIONS}
    routes = {
        (method, route.path.replace(":path", ""))
        for route in Api(None, "m").routes()
        for method in route.methods - {"HEAD"}
    }
    assert routes - described == {("GET", "/openapi.json")}
    assert described <= routes


def test_every_reference_leads_somewhere():
    content = json.loads(msgspec.json.encode(document("1")))
    for reference in references(content):
        assert reference.rpartition("/")[2] in content["components"]["schemas"]
    chat = content["components"]["schemas"]["ChatRequest"]["properties"]
    assert chat["n"] == {"type": "integer", "minimum": 1, "maximum": 64, "default": 1}


def test_it_is_served(serve):
    async def use(serving):
        return await serving.http.request("GET", "/openapi.json")

    status, headers, content = serve(use)
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(content)["openapi"] == "3.1.0"
