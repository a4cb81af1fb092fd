"""Everything that knows gRPC; the rest of the library exchanges messages and errors.

| module | what |
|---|---|
| `channel` | dialling a service; single calls |
| `client` | the client's side of a session on a bidirectional stream |
| `server` | running a service, in an event loop or as a process |
| `service`, `handlers` | what a service is; its methods as gRPC handlers |
| `session`, `registry`, `stream`, `protocol` | the server's side of a session |
| `spec` | whether a client's env fits, and how large its messages may be |
| `status` | errors to statuses and back |
| `auth` | TLS, client certificates, tokens |
| `health` | the standard health service, and its probe |
| `loop` | an event loop for callers that have none |
| `options` | channel and server options |
"""
