"""Hardened images to a registry of the user's, for a cluster's nodes, with the daemon's own credentials."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swe_lightning.errors import UserError
from swe_lightning.sandbox.docker_engine import short

if TYPE_CHECKING:
    import docker


def push_image(client: docker.APIClient, name: str, registry: str, as_name: str) -> dict[str, str]:
    """{"pushed": reference, "digest": of the manifest}: the image `name` of this machine, called `as_name` there.

    UserError with the registry's words when it refuses.
    """
    import docker.errors

    path, _, tag = as_name.rpartition(":")
    repository = f"{registry.rstrip('/')}/{path}"
    digest = ""
    try:
        client.tag(name, repository, tag=tag)
        for line in client.push(repository, tag=tag, stream=True, decode=True):
            if "error" in line:
                raise UserError(f"{repository}:{tag} could not be pushed: {' '.join(line['error'].split())}")
            digest = (line.get("aux") or {}).get("Digest", digest)
    except docker.errors.APIError as error:
        raise UserError(f"{repository}:{tag} could not be pushed: {short(error)}") from error
    return {"pushed": f"{repository}:{tag}", "digest": digest}
