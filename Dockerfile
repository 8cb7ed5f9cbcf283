# The main job in a container, for TPU hosts; --build-arg EXTRA=cuda13 for NVIDIA, EXTRA= for a CPU (release/containers.sh makes all).
#   docker build -t jaxrl_async . && mkdir -p runs
#   docker run --rm --user "$(id -u)" -v "$PWD/runs:/runs" jaxrl_async configs/addition.yaml run.dir=/runs
ARG PYTHON=3.12-slim-bookworm

FROM python:${PYTHON} AS build
ARG EXTRA=tpu
WORKDIR /src
RUN python -m venv /venv
COPY pyproject.toml setup.py constraints-3.12.txt README.md LICENSE ./
COPY configs ./configs
COPY jaxrl_async ./jaxrl_async
RUN /venv/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints-3.12.txt ".[prometheus${EXTRA:+,$EXTRA}]"

FROM python:${PYTHON}
# A numeric user, so that Kubernetes can check that it is not root; /runs is for containers without a volume.
RUN useradd --uid 1000 --create-home jaxrl && install -d -o jaxrl /runs /app
COPY --from=build /venv /venv
COPY configs /app/configs
WORKDIR /app
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1
USER 1000
ENTRYPOINT ["python", "-m", "jaxrl_async.train"]
CMD ["configs/addition.yaml", "run.dir=/runs"]
