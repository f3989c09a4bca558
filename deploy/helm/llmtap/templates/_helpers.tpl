{{- define "llmtap.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "llmtap.selector" -}}
app.kubernetes.io/name: {{ include "llmtap.fullname" . }}
{{- end -}}

{{- define "llmtap.labels" -}}
{{ include "llmtap.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Of a probe: how the admin port is asked. */}}
{{- define "llmtap.adminPort" -}}
port: admin{{ if .Values.adminTlsSecret }}, scheme: HTTPS{{ end }}
{{- end -}}

{{/* The container, in a pod of its own or beside an engine. */}}
{{- define "llmtap.container" -}}
name: llmtap
image: "{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
args: [proxy, --config, /etc/llmtap/llmtap.toml]
env:
  - name: LLMTAP_METER_ADMIN_TOKEN
    valueFrom:
      secretKeyRef: {name: {{ .Values.adminSecret }}, key: token}
  - name: LLMTAP_TENANTS_SALT
    valueFrom:
      secretKeyRef: {name: {{ .Values.adminSecret }}, key: salt}
  - name: LLMTAP_EXPERIMENT_KEY
    valueFrom:
      secretKeyRef: {name: {{ .Values.adminSecret }}, key: experiment-key, optional: true}
  - {name: LLMTAP_METER_STATE, value: /var/lib/llmtap/state}
  - name: POD_NAME
    valueFrom:
      fieldRef: {fieldPath: metadata.name}
  - {name: OTEL_RESOURCE_ATTRIBUTES, value: service.instance.id=$(POD_NAME)}
  {{- if .Values.adminTlsSecret }}
  - {name: LLMTAP_METER_ADMIN_TLS_CERTIFICATE, value: /etc/llmtap-admin-tls/tls.crt}
  - {name: LLMTAP_METER_ADMIN_TLS_KEY, value: /etc/llmtap-admin-tls/tls.key}
  {{- end }}
  {{- with .Values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - {name: http, containerPort: 8080}
  - {name: admin, containerPort: 9464}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
  seccompProfile: {type: RuntimeDefault}
startupProbe:
  httpGet: { {{- include "llmtap.adminPort" . }}, path: /readyz}
  periodSeconds: 1
  failureThreshold: 30
readinessProbe:
  {{- if .Values.meterProbes }}
  httpGet: { {{- include "llmtap.adminPort" . }}, path: /readyz}
  {{- else }}
  tcpSocket: {port: http}
  {{- end }}
  periodSeconds: 5
  failureThreshold: 3
livenessProbe:
  {{- if .Values.meterProbes }}
  httpGet: { {{- include "llmtap.adminPort" . }}, path: /healthz}
  {{- else }}
  tcpSocket: {port: http}
  {{- end }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
lifecycle:
  preStop:
    exec:
      command: [python, -c, "import time; time.sleep({{ .Values.preStopSeconds }})"]
resources:
  {{- toYaml .Values.resources | nindent 2 }}
volumeMounts:
  - {name: llmtap-config, mountPath: /etc/llmtap, readOnly: true}
  - {name: llmtap-run, mountPath: /run/llmtap}
  - {name: llmtap-capture, mountPath: /var/lib/llmtap}
  {{- if .Values.adminTlsSecret }}
  - {name: llmtap-admin-tls, mountPath: /etc/llmtap-admin-tls, readOnly: true}
  {{- end }}
  {{- with .Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* An entry of initContainers: it starts before the others and leaves after them. */}}
{{- define "llmtap.sidecar" -}}
- restartPolicy: Always
  {{- include "llmtap.container" . | nindent 2 }}
{{- end -}}

{{- define "llmtap.volumes" -}}
- name: llmtap-config
  configMap: {name: {{ include "llmtap.fullname" . }}}
- name: llmtap-run
  emptyDir: {medium: Memory, sizeLimit: 16Mi}
- name: llmtap-capture
  {{- with .Values.captureVolume }}
  {{- toYaml . | nindent 2 }}
  {{- else }}
  emptyDir: {sizeLimit: 12Gi}
  {{- end }}
{{- if .Values.adminTlsSecret }}
- name: llmtap-admin-tls
  secret: {secretName: {{ .Values.adminTlsSecret }}}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
