# llama-server with a packed cache: llama.cpp's own image, and the archive of `make dist` in it.
#
#   make dist && docker build -t llama-lowkv .
#   docker run --rm --read-only -v ~/models:/models:ro -p 8080:8080 llama-lowkv -m /models/model.gguf -c 32768
#
# b11434 is the newest llama.cpp that the plug-in knows; lowkv tries a newer one. LOWKV_SCHEME chooses the scheme
# (-e LOWKV_SCHEME=lowkv4). deploy/ has a compose file and a Kubernetes manifest; docs/deploying.md says more.
ARG BASE=ghcr.io/ggml-org/llama.cpp:server-b11434
FROM ${BASE}
ADD dist/lowkv-*-linux-*.tar.gz /opt/
RUN ln -s /opt/lowkv-*-linux-$(uname -m) /opt/lowkv && install -d -o 1000 -g 1000 /state
ENV PATH=/opt/lowkv/bin:$PATH
HEALTHCHECK --start-period=5m CMD ["curl", "-fsS", "http://localhost:8080/health"]
USER 1000:1000
ENTRYPOINT ["lowkv", "run", "--", "/app/llama-server"]
