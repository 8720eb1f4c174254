FROM python:3.13-slim AS build
WORKDIR /src
# The compiler builds the native parts, and the image does not keep it. Where none can be had, Python does the same.
RUN (apt-get update -q && apt-get install -y -q --no-install-recommends gcc libc6-dev) || echo "no compiler: no native parts"
RUN python3 -m venv /opt/dualmap
# Dependencies first: they change seldom, the layer stays cached while the code changes.
# Extras, with commas between them: docker build --build-arg EXTRAS=tokens,tracing
ARG EXTRAS=
COPY pyproject.toml ./
RUN python3 -c "import os, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = [name for name in os.environ.get('EXTRAS', '').split(',') if name]; \
print(*project['dependencies'], *(line for name in extras for line in project['optional-dependencies'][name]), sep='\n')" \
    > requirements.txt && /opt/dualmap/bin/pip install --no-cache-dir -r requirements.txt
COPY README.md LICENSE hatch_build.py ./
COPY dualmap dualmap
RUN /opt/dualmap/bin/pip install --no-cache-dir --no-deps . \
    && rm -rf /opt/dualmap/lib/python3*/site-packages/pip /opt/dualmap/bin/pip*

FROM python:3.13-slim
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin dualmap
COPY --from=build /opt/dualmap /opt/dualmap
ENV PATH=/opt/dualmap/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER dualmap
EXPOSE 8000
ENTRYPOINT ["dualmap"]
CMD ["--help"]
