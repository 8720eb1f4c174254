FROM python:3.13-slim AS build
WORKDIR /src
RUN python3 -m venv /opt/dualmap
# Dependencies first: they change seldom, the layer stays cached while the code changes.
COPY pyproject.toml ./
RUN python3 -c "import tomllib; print('\n'.join(tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies']))" \
    > requirements.txt && /opt/dualmap/bin/pip install --no-cache-dir -r requirements.txt
COPY README.md LICENSE ./
COPY cli cli
COPY router router
COPY scheduling scheduling
COPY simulation simulation
COPY statestore statestore
COPY workers workers
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
