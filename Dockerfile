# llama-server with a packed cache: llama.cpp's own image, and the archive of `make dist` in it.
#
#   make dist && docker build -t llama-lowkv .
#   docker run -v ~/models:/models -p 8080:8080 llama-lowkv -m /models/model.gguf -c 32768
#
# b11434 is the newest llama.cpp that the plug-in is for. LOWKV_SCHEME chooses the scheme (-e LOWKV_SCHEME=lowkv4).
FROM ghcr.io/ggml-org/llama.cpp:server-b11434
ADD dist/lowkv-*-linux-*.tar.gz /opt/
RUN ln -s /opt/lowkv-*-linux-$(uname -m) /opt/lowkv
ENV PATH=/opt/lowkv/bin:$PATH \
    GGML_BACKEND_PATH=/opt/lowkv/lib/lowkv/libggml-lowkv.so \
    LLAMA_ARG_DEVICE=LOWKV \
    LOWKV_SCHEME=lowkv2.8
