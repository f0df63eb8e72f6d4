# Images with the server, the command line and their libraries. No shell.
#
#   docker build -t flashcore .                      for GPUs, with CUDA 12: driver 530 or later on an L4
#   docker build -t flashcore --build-arg CUDA_IMAGE=docker.io/nvidia/cuda:13.0.1-devel-ubuntu24.04 .
#                                                    with CUDA 13: driver 580 or later
#   docker build -t flashcore:cpu --target cpu .     without CUDA
#
# The base images are used only to build. Any image with the packages of deploy/packages.sh works.
ARG CPU_IMAGE=docker.io/library/debian:12-slim
ARG CUDA_IMAGE=docker.io/nvidia/cuda:12.6.3-devel-ubuntu24.04

FROM scratch AS runtime
ARG REVISION=unknown
LABEL org.opencontainers.image.title="FlashCore" \
      org.opencontainers.image.description="Attention as a service: resident K/V and fused attention over gRPC" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="${REVISION}"
USER 65532:65532
# By default the server listens on the container's loopback only. To publish a port, name the address:
# --listen=0.0.0.0:7070, with TLS or --insecure_listen, and --metrics_listen=0.0.0.0:9464.
EXPOSE 7070 9464
ENTRYPOINT ["/usr/bin/flashcore-server"]
# At start a GPU's staging memory is pinned, which takes seconds.
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 \
  CMD ["/usr/bin/flashcore", "health", "--timeout=3s"]

FROM ${CPU_IMAGE} AS build-cpu
WORKDIR /src
COPY deploy/packages.sh deploy/
RUN bash -c 'source deploy/packages.sh && ensure_packages "${BUILD_PACKAGES[@]}"'
COPY . .
RUN cmake --preset image -DCMAKE_CUDA_COMPILER= && cmake --build --preset image && \
    deploy/image_root.sh /image build-image

FROM runtime AS cpu
COPY --from=build-cpu /image /

FROM ${CUDA_IMAGE} AS build-cuda
# Machine code for the L4. Other GPUs get PTX, which needs a driver as new as this CUDA.
ARG CUDA_ARCHITECTURES="89-real;80-virtual"
WORKDIR /src
COPY deploy/packages.sh deploy/
RUN bash -c 'source deploy/packages.sh && ensure_packages "${BUILD_PACKAGES[@]}"'
COPY . .
RUN cmake --preset image "-DCMAKE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES}" && \
    cmake --build --preset image && \
    deploy/image_root.sh /image build-image

FROM runtime AS cuda
COPY --from=build-cuda /image /
# NVIDIA's container runtime adds the driver's libcuda and nvidia-smi.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
