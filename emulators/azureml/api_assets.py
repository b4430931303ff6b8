"""Versioned assets: environments, code snapshots, data."""

from __future__ import annotations

import hashlib
from typing import Any

from isthmus.emulators.azureml.api_workspace import TYPE, WORKSPACE, check_place
from isthmus.emulators.azureml.blobs import ACCOUNT, Blobs, Place
from isthmus.emulators.azureml.checks_job import JOB_NAME
from isthmus.emulators.azureml.rules import refuse
from isthmus.emulators.azureml.web import Request, Response, Route, route
from isthmus.emulators.azureml.world import World

Assets = dict[tuple[str, str], dict[str, Any]]


class AssetsApi:
    """Operations on environments, codes and data assets."""

    def __init__(self, world: World, blobs: Blobs) -> None:
        self.world, self.blobs = world, blobs

    def routes(self) -> list[Route]:
        """What it serves."""
        found = []
        for kind, assets in (
            ("environments", self.world.environments),
            ("codes", self.world.codes),
            ("data", self.world.data),
        ):
            found += self._routes(kind, assets)
        upload = WORKSPACE + "/codes/{name}/versions/{version}/startPendingUpload"
        return [*found, route("codes.upload", "POST", upload, self.start_upload)]

    def _routes(self, kind: str, assets: Assets) -> list[Route]:
        container = WORKSPACE + f"/{kind}/{{name}}"
        version = container + "/versions/{version}"

        def put(request: Request) -> Response:
            return self._put(kind, assets, request)

        def get(request: Request) -> Response:
            return self._get(kind, assets, request)

        def versions(request: Request) -> Response:
            return self._versions(kind, assets, request)

        def of_name(request: Request) -> Response:
            return self._container(kind, assets, request)

        def names(request: Request) -> Response:
            return self._names(kind, assets, request)

        return [
            route(f"{kind}.list", "GET", WORKSPACE + f"/{kind}", names),
            route(f"{kind}.container", "GET", container, of_name),
            route(f"{kind}.container", "PUT", container, of_name),
            route(f"{kind}.versions", "GET", container + "/versions", versions),
            route(f"{kind}.get", "GET", version, get),
            route(f"{kind}.put", "PUT", version, put),
        ]

    def _id(self, kind: str, name: str, version: str | None = None) -> str:
        path = f"{self.world.path}/{kind}/{name}"
        return f"{path}/versions/{version}" if version else path

    def _shown(self, kind: str, name: str, version: str, body: dict[str, Any]) -> dict[str, Any]:
        identity = {"id": self._id(kind, name, version), "name": version}
        return {**body, **identity, "type": f"{TYPE}/workspaces/{kind}/versions"}

    def _put(self, kind: str, assets: Assets, request: Request) -> Response:
        check_place(request, self.world)
        name, version = request.names["name"], request.names["version"]
        body = request.body
        if not JOB_NAME.fullmatch(name) or not JOB_NAME.fullmatch(version.replace(".", "-")):
            raise refuse("asset-name", f"The name {name!r} or the version {version!r} is invalid")
        properties = body.get("properties") if isinstance(body, dict) else None
        if not isinstance(properties, dict):
            raise refuse("body", "properties is required")
        if kind == "environments":
            _check_environment(properties)
        with self.world.changed:
            before = assets.get((name, version))
            if before is not None and _fixed(before) != _fixed(body):
                raise refuse(
                    "asset-immutable", f"{kind} {name} of version {version} exists and cannot be changed"
                )
            if before is not None:
                before["properties"] |= {k: properties[k] for k in ("tags", "description") if k in properties}
            assets.setdefault((name, version), body)
            stored = assets[name, version]
        return Response(200 if before is not None else 201, self._shown(kind, name, version, stored))

    def _get(self, kind: str, assets: Assets, request: Request) -> Response:
        check_place(request, self.world)
        name, version = request.names["name"], request.names["version"]
        body = assets.get((name, version))
        if body is None:
            raise refuse("not-found", f"Could not find {kind} {name} of version {version}")
        return Response(200, self._shown(kind, name, version, body))

    def _versions(self, kind: str, assets: Assets, request: Request) -> Response:
        check_place(request, self.world)
        name, digest = request.names["name"], request.query.get("hash")
        # With a hash, the client's name for the new code is one that it has just drawn: any code of that hash will do.
        value = [
            self._shown(kind, known, version, body)
            for (known, version), body in reversed(list(assets.items()))
            if (known == name if digest is None else _hash(body) == digest)
        ]
        return Response(200, {"value": value})

    def _container(self, kind: str, assets: Assets, request: Request) -> Response:
        check_place(request, self.world)
        name = request.names["name"]
        versions = [version for known, version in assets if known == name]
        if not versions and request.method == "GET":
            raise refuse("not-found", f"Could not find {kind} {name}")
        latest = versions[-1] if versions else None
        following = str(int(latest) + 1) if latest and latest.isdigit() else "1"
        properties = {"latestVersion": latest, "nextVersion": following, "isArchived": False}
        body = {
            "id": self._id(kind, name),
            "name": name,
            "type": f"{TYPE}/workspaces/{kind}",
            "properties": properties,
        }
        return Response(200, body)

    def _names(self, kind: str, assets: Assets, request: Request) -> Response:
        check_place(request, self.world)
        value = []
        for name in dict.fromkeys(name for name, _ in assets):
            versions = [version for known, version in assets if known == name]
            properties = {"latestVersion": versions[-1], "nextVersion": "1", "isArchived": False}
            value.append({"id": self._id(kind, name), "name": name, "properties": properties})
        return Response(200, {"value": value})

    def start_upload(self, request: Request) -> Response:
        """A container of its own for a code snapshot, and a SAS to write into it."""
        check_place(request, self.world)
        key = f"{request.names['name']}/{request.names['version']}"
        container = "codes-" + hashlib.sha256(key.encode()).hexdigest()[:32]
        self.blobs.container(container)
        place = Place(container, "")
        body = {
            "pendingUploadId": container,
            "pendingUploadType": "TemporaryBlobReference",
            "blobReferenceForConsumption": {
                "blobUri": f"{self.blobs.endpoint}/{container}",
                "storageAccountArmId": f"{self.world.path.partition('/providers/')[0]}"
                f"/providers/Microsoft.Storage/storageAccounts/{ACCOUNT}",
                "credential": {
                    "credentialType": "SAS",
                    "sasUri": self.blobs.sas_url(place, "racwdl", hours=2),
                },
            },
        }
        return Response(200, body)


def _check_environment(properties: dict[str, Any]) -> None:
    image, build = properties.get("image"), properties.get("build")
    if not image and not (isinstance(build, dict) and build.get("contextUri")):
        raise refuse("environment-image", "An environment has an image or a build context")


def _hash(body: dict[str, Any]) -> str | None:
    found = (body["properties"].get("properties") or {}).get("hash_sha256")
    return None if found is None else str(found)


def _fixed(body: dict[str, Any]) -> dict[str, Any]:
    """What cannot be changed of a version."""
    kept = ("image", "build", "condaFile", "codeUri", "dataUri", "dataType", "osType")
    return {key: value for key, value in body["properties"].items() if key in kept and value is not None}
