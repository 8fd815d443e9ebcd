"""A small server that speaks the gRPC of https://modal.com, as the SDK's protobufs and source show it:
apps, images and sandboxes of the control plane, and commands of a worker's command router."""

# ruff: noqa: N802
import base64
import secrets

import grpclib.server
from box_services import Service, ended
from grpclib import GRPCError, Status
from machine import Machine
from modal_proto import api_pb2
from modal_proto import task_command_router_pb2 as router_pb2
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

TOKEN_ID = "ak-an-id"
# A JSON web token that expires in the year 2100.
CLAIMS = base64.urlsafe_b64encode(b'{"exp": 4102444800}').decode().rstrip("=")
TOKEN = f"e30.{CLAIMS}.c2ln"


KINDS = {"SandboxCreateV2": "create", "TaskExecStart": "exec", "SandboxTerminateV2": "kill"}


class Modal(Service):
    """Statuses of `faults` are gRPC's."""

    def __init__(self, key):
        self.commands = {}
        super().__init__(key)

    @property
    def environ(self):
        tokens = {"MODAL_TOKEN_ID": TOKEN_ID, "MODAL_TOKEN_SECRET": self.key}
        return tokens | {"MODAL_SERVER_URL": self.url}

    async def serve(self):
        self.server = grpclib.server.Server([ControlPlane(self), Router(self)])
        await self.server.start("127.0.0.1", 0)
        [socket] = self.server._server.sockets
        return f"http://127.0.0.1:{socket.getsockname()[1]}"

    async def stop(self):
        self.server.close()

    def machine(self, name):
        if not self.machines[name].is_running:
            raise GRPCError(Status.NOT_FOUND, f"task {name} was not found")
        return self.machines[name]


def call(handler):
    """A method for a call with one answer."""

    async def method(self, stream):
        request = await stream.recv_message()
        if stream.metadata.get("x-modal-token-secret", self.service.key) != self.service.key:
            raise GRPCError(Status.UNAUTHENTICATED, "Token validation failed")
        fault = self.service.fault(KINDS.get(handler.__name__, handler.__name__))
        if isinstance(fault, tuple):
            raise GRPCError(Status(fault[0]), f"no, {self.service.key}")
        answer = await handler(self, request)
        if isinstance(fault, list):
            answer = type(answer)(**fault[0])
        if fault == "cut":
            await stream.cancel()
        else:
            await stream.send_message(answer)

    return method


class ControlPlane(ModalClientBase):
    def __init__(self, service):
        self.service = service

    @call
    async def AuthTokenGet(self, request):
        return api_pb2.AuthTokenGetResponse(token=TOKEN)

    @call
    async def AppGetOrCreate(self, request):
        return api_pb2.AppGetOrCreateResponse(app_id="ap-1")

    @call
    async def EnvironmentGetOrCreate(self, request):
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    @call
    async def ImageGetOrCreate(self, request):
        done = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
        return api_pb2.ImageGetOrCreateResponse(image_id="im-1", result=done)

    @call
    async def SandboxCreateV2(self, request):
        names = [created.definition.name for created in self.service.sandboxes.values()]
        if request.definition.name in names:
            raise GRPCError(Status.ALREADY_EXISTS, "a sandbox with this name exists")
        name = f"sb-{secrets.token_hex(8)}V"
        self.service.machines[name] = Machine()
        self.service.sandboxes[name] = request
        return api_pb2.SandboxCreateV2Response(sandbox_id=name, task_id=name)

    @call
    async def SandboxGetFromNameV2(self, request):
        for name, created in self.service.sandboxes.items():
            if created.definition.name == request.sandbox_name:
                return api_pb2.SandboxGetFromNameResponse(sandbox_id=name)
        raise GRPCError(Status.NOT_FOUND, "no such sandbox")

    @call
    async def SandboxGetTaskIdV2(self, request):
        return api_pb2.SandboxGetTaskIdResponse(task_id=request.sandbox_id)

    @call
    async def SandboxGetCommandRouterAccess(self, request):
        self.service.machine(request.sandbox_id or request.task_id)
        url = self.service.url
        return api_pb2.SandboxGetCommandRouterAccessResponse(url=url, jwt=TOKEN)

    @call
    async def SandboxWaitV2(self, request):
        result = api_pb2.GenericResult()
        if not self.service.machines[request.sandbox_id].is_running:
            result.status = api_pb2.GenericResult.GENERIC_STATUS_TERMINATED
        return api_pb2.SandboxWaitResponse(result=result)

    @call
    async def SandboxTerminateV2(self, request):
        self.service.machines[request.sandbox_id].kill()
        return api_pb2.SandboxTerminateResponse()

    @call
    async def SandboxListV2(self, request):
        asked = {tag.tag_name: tag.tag_value for tag in request.tags}
        listed = []
        for name, created in self.service.sandboxes.items():
            tags = {tag.tag_name: tag.tag_value for tag in created.tags}
            is_running = self.service.machines[name].is_running
            if is_running and asked.items() <= tags.items() and not request.before_timestamp:
                listed.append(api_pb2.SandboxInfo(id=name, created_at=1.0))
        return api_pb2.SandboxListResponse(sandboxes=listed)


class Router(TaskCommandRouterBase):
    def __init__(self, service):
        self.service = service

    @call
    async def TaskExecStart(self, request):
        machine = self.service.machine(request.task_id)
        if request.exec_id not in self.service.commands:
            process = await machine.start([*request.command_args], stdin=True)
            self.service.commands[request.exec_id] = process
        return router_pb2.TaskExecStartResponse()

    async def TaskExecStdioRead(self, stream):
        request = await stream.recv_message()
        process = self.service.commands[request.exec_id]
        is_stdout = request.file_descriptor == router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT
        output = process.stdout if is_stdout else process.stderr
        cut = self.service.fault("stdout" if is_stdout else "stderr")
        if cut is not None:
            for data in cut:
                await stream.send_message(router_pb2.TaskExecStdioReadResponse(data=data))
            return
        while data := await output.read(1 << 15):
            await stream.send_message(router_pb2.TaskExecStdioReadResponse(data=data))
        self.service.machine(request.task_id)

    @call
    async def TaskExecStdinWrite(self, request):
        process = self.service.commands[request.exec_id]
        process.stdin.write(request.data)
        await process.stdin.drain()
        if request.eof:
            process.stdin.close()
        return router_pb2.TaskExecStdinWriteResponse()

    @call
    async def TaskExecWait(self, request):
        code = await ended(self.service.commands[request.exec_id])
        self.service.machine(request.task_id)
        if code < 0:
            return router_pb2.TaskExecWaitResponse(signal=-code)
        return router_pb2.TaskExecWaitResponse(code=code)


# Calls that boxes do not need are not answered.
ControlPlane.__abstractmethods__ = frozenset()
Router.__abstractmethods__ = frozenset()
