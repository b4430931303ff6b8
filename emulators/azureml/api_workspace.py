"""The workspace itself, its datastores, what its region offers, and tokens."""

from __future__ import annotations

from isthmus.emulators.azureml.blobs import ACCOUNT, KEY
from isthmus.emulators.azureml.identity import Tokens
from isthmus.emulators.azureml.rules import refuse
from isthmus.emulators.azureml.skus import SKUS, usage_name
from isthmus.emulators.azureml.web import Request, Response, Route, route
from isthmus.emulators.azureml.world import LOW_PRIORITY, World

PROVIDER = "/providers/Microsoft\\.MachineLearningServices"
WORKSPACE = "/subscriptions/{subscription}/resourceGroups/{group}" + PROVIDER + "/workspaces/{workspace}"
TYPE = "Microsoft.MachineLearningServices"


def check_place(request: Request, world: World) -> None:
    """Whether a path's subscription, resource group and workspace are ours.

    Raises:
        Refused: one is not.
    """
    subscription = request.names.get("subscription", world.subscription)
    if subscription.lower() != world.subscription.lower():
        raise refuse("subscription", f"The subscription '{subscription}' could not be found.")
    group = request.names.get("group", world.resource_group)
    name = request.names.get("workspace", world.workspace)
    if (group.lower(), name.lower()) != (world.resource_group.lower(), world.workspace.lower()):
        raise refuse(
            "workspace",
            f"The Resource '{TYPE}/workspaces/{name}' under resource group '{group}' was not found.",
        )


class WorkspaceApi:
    """Operations on the workspace and its region."""

    def __init__(self, world: World, tokens: Tokens) -> None:
        self.world, self.tokens = world, tokens

    def routes(self) -> list[Route]:
        """What it serves."""
        region = "/subscriptions/{subscription}" + PROVIDER + "/locations/{region}"
        return [
            route("workspace.get", "GET", WORKSPACE, self.get),
            route("discovery.get", "GET", "/discovery.*", self.discovery, open=True),
            route("datastores.list", "GET", WORKSPACE + "/datastores", self.datastores),
            route("datastores.get", "GET", WORKSPACE + "/datastores/{name}", self.datastore),
            route("datastores.secrets", "POST", WORKSPACE + "/datastores/{name}/listSecrets", self.secrets),
            route("usages.list", "GET", region + "/usages", self.usages),
            route("vmsizes.list", "GET", region + "/vmSizes", self.sizes),
            route("token.get", "GET", "/msi/token", self.token, open=True),
        ]

    def get(self, request: Request) -> Response:
        """The workspace."""
        world = self.world
        check_place(request, world)
        properties = {
            "friendlyName": world.workspace,
            "workspaceId": world.workspace_id,
            "discoveryUrl": f"{request.base}/discovery",
            "mlFlowTrackingUri": f"azureml://{request.base.partition('://')[2]}/mlflow/v1.0{world.path}",
            "storageAccount": self._account(),
            "provisioningState": "Succeeded",
            "hbiWorkspace": False,
        }
        body = {
            "id": world.path,
            "name": world.workspace,
            "type": f"{TYPE}/workspaces",
            "location": world.region,
            "identity": {"type": "SystemAssigned"},
            "tags": {},
            "properties": properties,
        }
        return Response(200, body)

    def _account(self) -> str:
        world = self.world
        return (
            f"/subscriptions/{world.subscription}/resourceGroups/{world.resource_group}"
            f"/providers/Microsoft.Storage/storageAccounts/{ACCOUNT}"
        )

    def discovery(self, request: Request) -> Response:
        """Where the workspace's other services are: all here."""
        services = ("api", "history", "catalog", "experimentation", "datasets", "artifact", "metric")
        return Response(200, dict.fromkeys(services, request.base))

    def _datastore(self, name: str) -> dict[str, object]:
        properties = {
            "datastoreType": "AzureBlob",
            "accountName": ACCOUNT,
            "containerName": self.world.datastores[name],
            "endpoint": "core.windows.net",
            "protocol": "https",
            "isDefault": name == "workspaceblobstore",
            "credentials": {"credentialsType": "AccountKey"},
        }
        kind = f"{TYPE}/workspaces/datastores"
        return {
            "id": f"{self.world.path}/datastores/{name}",
            "name": name,
            "type": kind,
            "properties": properties,
        }

    def datastores(self, request: Request) -> Response:
        """All of them; the default alone with ?isDefault=true."""
        check_place(request, self.world)
        only = request.query.get("isDefault", "").lower() == "true"
        names = [name for name in self.world.datastores if not only or name == "workspaceblobstore"]
        return Response(200, {"value": [self._datastore(name) for name in names]})

    def datastore(self, request: Request) -> Response:
        """One of them."""
        check_place(request, self.world)
        name = request.names["name"]
        if name not in self.world.datastores:
            raise refuse("not-found", f"Could not find datastore with name: {name}")
        return Response(200, self._datastore(name))

    def secrets(self, request: Request) -> Response:
        """The account's key (Azurite's own, known to all)."""
        self.datastore(request)
        return Response(200, {"secretsType": "AccountKey", "key": KEY})

    def usages(self, request: Request) -> Response:
        """vCPUs in use and their limits: families on dedicated nodes, and the one pool of low priority."""
        check_place(request, self.world)
        world = self.world
        prefix = f"/subscriptions/{world.subscription}/providers/{TYPE}/locations/{world.region}/usages"
        families = sorted({sku.family for sku in SKUS.values()})

        def usage(kind: str, name: str, value: int, limit: int) -> dict[str, object]:
            return {
                "id": f"{prefix}/{name.replace(' ', '_')}",
                "type": f"{TYPE}/{kind}/usages",
                "unit": "Count",
                "currentValue": value,
                "limit": limit,
                "name": {"value": name, "localizedValue": name},
            }

        with world.changed:
            used = {family: world.cores_in_use(family, low_priority=False) for family in families}
            low = world.cores_in_use("", low_priority=True)
            total = "Total Cluster {} Regional vCPUs"
            limits = {family: world.quota[family] for family in families}
            value = [
                usage("dedicatedCores", total.format("Dedicated"), sum(used.values()), sum(limits.values())),
                usage("lowPriorityCores", total.format("LowPriority"), low, world.quota[LOW_PRIORITY]),
            ]
            for family in families:
                value.append(usage("vmFamily", usage_name(family), used[family], limits[family]))
                # The pool is what counts: families have no limit of their own there.
                value.append(usage("vmFamily", usage_name(family, low_priority=True), 0, -1))
        return Response(200, {"value": value})

    def sizes(self, request: Request) -> Response:
        """The VM sizes that a region offers."""
        check_place(request, self.world)
        region = request.names["region"].lower()
        offered = [sku.to_json() for sku in SKUS.values() if self.world.sku(sku.name, region)]
        return Response(200, {"value": offered})

    def token(self, request: Request) -> Response:
        """A managed identity's token, in App Service's form and in Azure ML's."""
        headers, query = request.headers, request.query
        secret = headers.get("x-identity-header") or headers.get("secret") or ""
        client = query.get("client_id") or query.get("clientid")
        status, body = self.tokens.token(secret, query.get("resource", ""), client)
        return Response(status, body)
