{{/* A kind of worker: its headless Service and its StatefulSet. Arguments as in _pod.tpl, with "port", "metricsPort", and "pagePort" and "sessionPort", if any. */}}
{{- define "baton.worker" -}}
{{- $name := printf "%s-%s" (include "baton.name" .root) .component }}
{{- $drain := int .root.Values.drainTimeoutS }}
{{- $rdma := .of.rdma | default dict }}
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels: {{ include "baton.labels" . | nindent 4 }}
spec:
  # Headless: routers and workers find each other in Redis. It gives pods names, and Prometheus its targets.
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {{ include "baton.selector" . | nindent 4 }}
  ports:
    - {name: grpc, port: {{ .port }}, targetPort: grpc}
    - {name: metrics, port: {{ .metricsPort }}, targetPort: metrics}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name }}
  labels: {{ include "baton.labels" . | nindent 4 }}
spec:
  {{- if not .of.autoscaling.enabled }}
  replicas: {{ .of.replicas }}
  {{- end }}
  serviceName: {{ $name }}
  podManagementPolicy: Parallel
  selector:
    matchLabels: {{ include "baton.selector" . | nindent 6 }}
  template:
    metadata:
      labels: {{ include "baton.labels" . | nindent 8 }}
      {{- with .of.podAnnotations }}
      annotations: {{ toYaml . | nindent 8 }}
      {{- end }}
    spec:
      # More than preStop, drain and exit need.
      terminationGracePeriodSeconds: {{ add $drain 45 }}
      automountServiceAccountToken: false
      # A Service named baton would set BATON_PORT.
      enableServiceLinks: false
      securityContext: {{ include "baton.podSecurity" . | nindent 8 }}
      {{- with .of.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      {{- include "baton.scheduling" . | nindent 6 }}
      containers:
        - name: {{ .component }}
          image: "{{ .root.Values.image.worker.repository }}:{{ .root.Values.image.worker.tag | default .root.Chart.AppVersion }}"
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          args: [serve, {{ .component }}]
          env:
            {{- include "baton.env" . | nindent 12 }}
            - {name: BATON_WORKER_ID, value: $(POD_NAME)}
            - {name: BATON_PORT, value: {{ .port | quote }}}
            {{- if .pagePort }}
            - {name: BATON_PAGE_PORT, value: {{ .pagePort | quote }}}
            {{- end }}
            {{- if .sessionPort }}
            - {name: BATON_SESSION_PORT, value: {{ .sessionPort | quote }}}
            {{- end }}
            - {name: BATON_METRICS_PORT, value: {{ .metricsPort | quote }}}
            - name: BATON_ADVERTISE_ADDRESS
              {{- if .root.Values.tls.existingSecret }}
              value: $(POD_NAME).{{ $name }}.{{ .root.Release.Namespace }}.svc.{{ .root.Values.clusterDomain }}:{{ .port }}
              {{- else }}
              value: $(POD_IP):{{ .port }}
              {{- end }}
            {{- if $rdma.netDevices }}
            - {name: UCX_NET_DEVICES, value: {{ $rdma.netDevices | quote }}}
            {{- end }}
            {{- if .of.gpus }}
            - {name: FLASHINFER_WORKSPACE_BASE, value: /var/lib/baton/flashinfer}
            {{- end }}
          ports:
            - {name: grpc, containerPort: {{ .port }}}
            {{- if .pagePort }}
            - {name: pages, containerPort: {{ .pagePort }}}
            {{- end }}
            {{- if .sessionPort }}
            - {name: sessions, containerPort: {{ .sessionPort }}}
            {{- end }}
            - {name: metrics, containerPort: {{ .metricsPort }}}
          # Metrics are served once the model is loaded and checked.
          startupProbe:
            httpGet: {path: /metrics, port: metrics}
            periodSeconds: 5
            failureThreshold: {{ div (add (int .of.startupTimeoutS) 4) 5 }}
          # Not ready while it drains, and decode while it has no link. Kubernetes has no gRPC probe over TLS.
          readinessProbe:
            {{- if .root.Values.tls.existingSecret }}
            tcpSocket: {port: grpc}
            {{- else }}
            grpc: {port: {{ .port }}}
            {{- end }}
            periodSeconds: 5
          livenessProbe:
            httpGet: {path: /metrics, port: metrics}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          lifecycle:
            preStop:
              exec:
                # The worker ends itself when it is drained; where this fails, SIGTERM drains it as well.
                command: [sh, -c, 'exec baton drain "$BATON_WORKER_ID" --wait-s {{ add $drain 10 }}']
          resources: {{ include "baton.workerResources" . | nindent 12 }}
          securityContext:
            readOnlyRootFilesystem: true
            allowPrivilegeEscalation: false
            capabilities:
              drop: [ALL]
              {{- if $rdma.resource }}
              add: [IPC_LOCK] # registered memory is locked
              {{- end }}
          volumeMounts:
            {{- include "baton.mounts" . | nindent 12 }}
            - {name: shm, mountPath: /dev/shm}
            {{- if .of.gpus }}
            - {name: flashinfer, mountPath: /var/lib/baton/flashinfer}
            {{- end }}
      volumes:
        {{- include "baton.volumes" . | nindent 8 }}
        - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .of.shmSize }}}}
        {{- if .of.gpus }}
        - {name: flashinfer, emptyDir: {}}
        {{- end }}
{{- end }}

{{/* The resources of a worker with its GPUs and RDMA devices. */}}
{{- define "baton.workerResources" -}}
{{- $devices := dict }}
{{- if .of.gpus }}{{ $_ := set $devices "nvidia.com/gpu" (int .of.gpus) }}{{ end }}
{{- with .of.rdma }}{{ if .resource }}{{ $_ := set $devices .resource (int .count) }}{{ end }}{{ end }}
{{- toYaml (mergeOverwrite (deepCopy .of.resources) (dict "limits" (mergeOverwrite (deepCopy (.of.resources.limits | default dict)) $devices))) }}
{{- end }}
